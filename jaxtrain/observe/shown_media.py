"""The media of a run that its report shows: of each tag some steps, within a number of bytes."""

import base64
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.folder_files import open_file, read_file
from jaxtrain.observe.media_files import cell_text, read_table
from jaxtrain.observe.run_record import Record
from jaxtrain.run_folder import RunFolder

_PAGE_BYTES = 8 * 2**20  # of the files of all runs and tags
_MOST_BYTES = 16 * 2**20  # of a table or a text that is read whole
_MOST_PIXELS = 2**24
_STEPS, _ITEMS = 50, 24  # of a tag; of a step
_CHARACTERS, _ROWS, _COLUMNS = 20_000, 100, 30  # of a text; of a table
_FEW = 10  # rows, below which the cells of a table are not shown longer
_SMALL = 128  # pixels; narrower images are enlarged


@dataclass(frozen=True)
class Item:
    """One medium."""

    kind: str
    """image, audio, text or table."""
    source: str = ""
    """Data URI of an image or of audio."""
    width: int = 0
    """Width of an image in the page, in pixels."""
    is_enlarged: bool = False
    text: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left_out: str = ""
    """What is not shown of it."""


@dataclass(frozen=True)
class ShownStep:
    """The media of a tag at a step."""

    step: int
    items: Sequence[Item]
    left_out: str = ""


@dataclass(frozen=True)
class ShownTag:
    """The media of a tag."""

    run: str
    """The path of the run's folder."""
    tag: str
    steps: Sequence[ShownStep] = field(default_factory=list)
    left_out: str = ""


def shown_media(records: Sequence[Record]) -> list[ShownTag]:
    """Select and read the media that a report of these runs shows."""
    tags = [
        (record, tag) for record in records for tag in dict.fromkeys(t for line in record.metrics for t in line.media)
    ]
    return [_shown_tag(record, tag, _PAGE_BYTES // len(tags)) for record, tag in tags]


def _shown_tag(record: Record, tag: str, most_bytes: int) -> ShownTag:
    folder = RunFolder(Path(record.name)).media
    lines = [line for line in record.metrics if tag in line.media]
    files = [[folder / Path(name).name for name in line.media[tag]] for line in lines]
    chosen = spread([sum(map(_size, paths[:_ITEMS])) for paths in files], most_bytes)
    steps = [_shown_step(lines[i].step, files[i], most_bytes) for i in chosen]
    left_out = f"{len(chosen):,} of {len(lines):,} steps are shown: all are in {folder}"
    return ShownTag(record.name, tag, steps, left_out if len(chosen) < len(lines) else "")


def spread(sizes: Sequence[int], most_bytes: int, most: int = _STEPS) -> list[int]:
    """Return the indices of as many steps as fit, evenly spaced and with the last one, which is always included.

    >>> spread([1, 1, 1, 1, 1], most_bytes=3)
    [0, 2, 4]
    >>> spread([1, 1, 9], most_bytes=3)
    [2]
    """
    last = len(sizes) - 1
    for count in range(min(most, len(sizes)), 1, -1):
        indices = sorted({int(i) for i in np.linspace(0, last, count).round()})
        if sum(sizes[i] for i in indices) <= most_bytes:
            return indices
    return [last]


def _shown_step(step: int, paths: Sequence[Path], most_bytes: int) -> ShownStep:
    items: list[Item] = []
    for path in paths[:_ITEMS]:
        size = _size(path)
        if os.path.lexists(path) and size <= most_bytes:
            items.append(_item(path))
            most_bytes -= size
    left_out = f"{len(items):,} of {len(paths):,} are shown: all are in {paths[0].parent}"
    return ShownStep(step, items, left_out if len(items) < len(paths) else "")


def _size(path: Path) -> int:
    """Return the bytes that a file takes in the page, about."""
    try:
        size = path.lstat().st_size
    except (OSError, ValueError):  # there is none, or its name is not one of a file
        return 0
    return min(size, _CHARACTERS) if path.suffix in (".txt", ".json") else size


def _item(path: Path) -> Item:
    """Return a medium; a text that says why, if it cannot be shown."""
    try:
        match path.suffix:
            case ".png":
                return _image(_read(path))
            case ".wav":
                return Item("audio", source=_uri("audio/wav", _read(path)))
            case ".txt":
                return _text(path)
            case _:
                return _table(*read_table(_read(path)))
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        return Item("text", left_out=f"{path.name} is not shown: {why}")


def _read(path: Path) -> bytes:
    return read_file(path, path.parents[1], most=_MOST_BYTES)


def _text(path: Path) -> Item:
    with open_file(path, path.parents[1]) as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(min(size, _MOST_BYTES)).decode(errors="replace")
    whole = f"{len(text):,} characters" if size <= _MOST_BYTES else f"{size:,} bytes"
    cut = f"the first {_CHARACTERS:,} of {whole}" if len(text) > _CHARACTERS else ""
    return Item("text", text=text[:_CHARACTERS], left_out=cut)


def _image(data: bytes) -> Item:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a large image, which is refused below
            with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
                width, height = picture.size
    except Exception as error:  # Pillow raises many types
        raise ValueError(f"it is not a PNG image ({error})") from None
    if width * height > _MOST_PIXELS:
        raise ValueError(f"it is {width}x{height}, more than {_MOST_PIXELS:,} pixels")
    scale = max(_SMALL // width, 1)
    return Item("image", source=_uri("image/png", data), width=width * scale, is_enlarged=scale > 1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Item:
    most = _CHARACTERS // min(max(len(rows), _FEW), _ROWS)  # of a cell
    shown = [[_short(cell_text(cell), most) for cell in row[:_COLUMNS]] for row in rows[:_ROWS]]
    cut = [
        f"the first {limit:,} of {count:,} {what}"
        for count, limit, what in ((len(rows), _ROWS, "rows"), (len(columns), _COLUMNS, "columns"))
        if count > limit
    ]
    return Item(
        "table", columns=[_short(name, most) for name in columns[:_COLUMNS]], rows=shown, left_out=", ".join(cut)
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
