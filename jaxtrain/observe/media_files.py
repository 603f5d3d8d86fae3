"""The files of media in a run's folder."""

import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxtrain.data import replace_unprintable
from jaxtrain.fields import from_json
from jaxtrain.folder_files import make_folder, parse_json, write_file
from jaxtrain.observe.log_line import LogLine
from jaxtrain.run import Media, MediaFile

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~])")
Item = TypeVar("Item")
_TAG_LENGTH, _HASH_LENGTH = 60, 12  # characters of a file's name
_CELLS = 4  # of a row in a terminal


@dataclass(frozen=True)
class _Table:
    """The types of a table's file."""

    columns: list[str]
    data: list[list[Any]]


def write_media(folder: Path, step: int, media: Media) -> dict[str, list[str]]:
    """Write the files of a step, each atomically.

    A name contains a hash of the content: a step that is repeated after a resume writes the same file again, or another
    one, and never replaces what a line of metrics.superseded.jsonl names.

    Args:
      folder: The folder of media; created if there is none.
      step: The step.
      media: The files, by tag.

    Returns:
      The names of the files, by tag.

    Raises:
      OSError: The operating system refuses a write.
    """
    if media:
        make_folder(folder)
    names = {tag: [_name(step, tag, file) for file in files] for tag, files in media.items()}
    for tag, files in media.items():
        for name, file in zip(names[tag], files, strict=True):
            write_file(folder / name, file.data)
    return names


def numbered(tag: str, items: Sequence[Item]) -> Iterator[tuple[str, Item]]:
    """Yield the items of a tag with their names in TensorBoard and trackers.

    >>> [*numbered("digit", ["a"])], [*numbered("digit", ["a", "b"])]
    ([('digit', 'a')], [('digit/0', 'a'), ('digit/1', 'b')])
    """
    for i, item in enumerate(items):
        yield tag if len(items) == 1 else f"{tag}/{i}", item


def media_paths(folder: Path, line: LogLine) -> Iterator[tuple[str, Path]]:
    """Yield the files of a line that exist, with their names as of `numbered`.

    Args:
      folder: The folder of media.
      line: A line of the run.
    """
    for tag, names in line.media.items():
        for name, file in numbered(tag, names):
            path = folder / Path(file).name
            if path.is_file() and not path.is_symlink():
                yield name, path


def read_table(data: bytes) -> tuple[list[str], list[list[Any]]]:
    """Return the (columns, rows) of a table's file. Raises `ValueError` if it contains no table."""
    table = from_json(_Table, parse_json(data))
    return table.columns, table.data


def first_rows(media: Media) -> dict[str, dict[str, str]]:
    """Return the first row of each table for a terminal, by tag: the texts of its first cells, by column.

    >>> data = b'{"columns": ["prompt", "answer"], "data": [["2 + 2 =", "4"], ["3 + 3 =", "6"]]}'
    >>> first_rows({"answers": [MediaFile("json", data)]})
    {'answers': {'prompt': '2 + 2 =', 'answer': '4'}}
    """
    found = {}
    for tag, files in media.items():
        if files[0].suffix == "json":
            columns, rows = read_table(files[0].data)
            for row in rows[:1]:
                cells = (" ".join(replace_unprintable(cell_text(cell)).split()) for cell in row[:_CELLS])
                found[tag] = dict(zip(columns, cells, strict=False))
    return found


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as Markdown that shows the texts of its cells verbatim.

    >>> print(markdown_table(["word", "loss"], [["a|b", 0.5], ["<i>", None]]))
    | word | loss |
    | --- | --- |
    | a\\|b | 0\\.5 |
    | &lt;i&gt; |  |
    """
    lines = [[_verbatim(column) for column in columns], ["---"] * len(columns)]
    lines += [[_verbatim(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell_text(value: Any) -> str:
    """Return a cell of a table as text.

    >>> [cell_text(value) for value in ("a", 1 / 3, 5, True, None)]
    ['a', '0.333333', '5', 'true', '']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _verbatim(value: Any) -> str:
    text = " ".join(cell_text(value).splitlines())
    return _MARKDOWN.sub(r"\\\1", html.escape(text, quote=False))


def _name(step: int, tag: str, file: MediaFile) -> str:
    readable = re.sub(r"[^A-Za-z0-9]+", "-", tag)[:_TAG_LENGTH]
    return f"{step}-{readable}-{hashlib.sha256(file.data).hexdigest()[:_HASH_LENGTH]}.{file.suffix}"
