"""Files of examples to fine-tune on: JSON Lines, JSON, parquet, Arrow and datasets saved by `datasets`."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.listing import files_under
from jaxtrain.data.files.splits import files_of_splits, names_except
from jaxtrain.data.finetuning.examples import parse_example
from jaxtrain.data.holdout import random_split
from jaxtrain.data.shards.token_cache import file_identity
from jaxtrain.data.sources import Example
from jaxtrain.data.tables.json_rows import JSON_SUFFIXES, json_rows
from jaxtrain.data.tables.table_files import is_table, opened_table, saved_splits, table, table_splits
from jaxtrain.data.tables.table_rows import ARROW_SUFFIXES
from jaxtrain.errors import UserError
from jaxtrain.records import report_unread

Parse: TypeAlias = Callable[[Example, str], Any]
"""Type of a function of a row and its name for messages that returns an example."""


class _Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...

    def location(self, index: int) -> str:
        """Return the name of a row for messages."""
        ...


@dataclass(frozen=True, eq=False)
class ExampleFiles:
    """Examples of one kind, parsed on access: item `i` is as `parse` returns it.

    Attributes:
      rows: Rows of the files.
      files: The files.
      kind: Type of the examples.
      indices: Numbers of the rows that are examples, int [N]; None for all.
      parse: Makes an example of a row.
    """

    rows: _Rows
    files: tuple[Path, ...]
    kind: type[Any]
    indices: NDArray[np.intp] | None = None
    parse: Parse = parse_example

    def __len__(self) -> int:
        return len(self.rows) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = index if self.indices is None else int(self.indices[index])
        where = self.rows.location(number)
        example = self.parse(self.rows[number], where)
        if type(example) is not self.kind:
            raise UserError(
                f"{where} is a {type(example).__name__}, the first example a {self.kind.__name__}: put examples of"
                " different fields into different files"
            )
        return example

    @property
    def place(self) -> Path:
        """The file, or the folder of several, for messages."""
        return self.files[0] if len(self.files) == 1 else self.files[0].parent

    def identity(self) -> list[str]:
        """Return texts that change whenever the examples may."""
        rows = "all" if self.indices is None else hashlib.sha256(self.indices.tobytes()).hexdigest()
        return [f"{rows} {len(self)}", *map(file_identity, self.files)]


def read_examples(path: str | os.PathLike[str], parse: Parse = parse_example) -> ExampleFiles:
    """Open the examples of a file, a folder of files of one format, or a dataset saved by `datasets`.

    Args:
      path: `.jsonl`, `.ndjson` or `.json`, `.parquet`, `.arrow` or `.feather`; no pickle is read.
      parse: Makes an example of a row: `parse_example`, or `parse_labelled` for texts with labels.

    Returns:
      The examples; their kind is that of the first.

    Raises:
      UserError: There is no such file, there are several splits, or the first example is malformed; on access, if the
        example is.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = Path(folder, "pairs.jsonl")
      ...     _ = file.write_text('{"prompt": "6 * 7 = ", "completion": "42"}\\n')
      ...     examples = read_examples(file)
      ...     examples.kind.__name__, examples[0].completion
      ('Completion', '42')
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{root} does not exist: use a file of examples")
    if is_table(root):
        return _open(table(root, nested=True), [root] if root.is_file() else files_under(root), parse)
    files = _json_files(root)
    if files_of_splits(files, root):
        raise UserError(f"{root} has several splits: use one of its files or sub-folders")
    return _open(json_rows(files), files, parse)


def split_examples(
    path: str | os.PathLike[str], validation_fraction: float = 0.1, parse: Parse = parse_example
) -> tuple[ExampleFiles, ExampleFiles]:
    """Open examples as (train, validation).

    The splits are those of a saved dataset, or of a folder in which files or sub-folders are named `train` and
    `validation` (or `valid`, `val`, `dev`, `eval`, `test`), such as `train-00000-of-00002.parquet`; otherwise examples
    are held out at random, the same for equal numbers of examples.

    Args:
      path: As for `read_examples`.
      validation_fraction: Fraction that is held out, for data without splits.
      parse: As for `read_examples`.

    Raises:
      UserError: As `read_examples`; or there are too few examples to split.
    """
    root = Path(path)
    if saved := saved_splits(root):
        train, validation = (read_examples(split, parse) for split in saved)
        return train, validation
    if root.is_dir() and (named := table_splits(root) if is_table(root) else _json_splits(root)):
        train, validation = (_open(_rows(files), files, parse) for files in named)
        return train, validation
    examples = read_examples(root, parse)
    train_rows, validation_rows = random_split(len(examples), validation_fraction)
    return replace(examples, indices=train_rows), replace(examples, indices=validation_rows)


def _json_splits(root: Path) -> tuple[list[Path], list[Path]] | None:
    files = _json_files(root)
    splits = files_of_splits(files, root)
    if splits is not None:
        report_unread(root, names_except(files, [*splits[0], *splits[1]], root), what="files")
    return splits


def _json_files(root: Path) -> list[Path]:
    """Return the JSON files of a path, and name the other files of a folder."""
    files = [root] if root.is_file() else files_under(root)
    found = [file for file in files if file.suffix.lower() in JSON_SUFFIXES]
    if not found:
        formats = ", ".join((*JSON_SUFFIXES, ".parquet", *ARROW_SUFFIXES))
        raise UserError(f"{root} has no examples: use {formats}, a folder of these, or a dataset saved by datasets")
    report_unread(root, names_except(files, found, root), what="files")
    return found


def _rows(files: Sequence[Path]) -> Any:
    return json_rows(files) if files[0].suffix.lower() in JSON_SUFFIXES else opened_table(files, nested=True)


def _open(rows: Any, files: Sequence[Path], parse: Parse) -> ExampleFiles:
    if not len(rows):
        raise UserError(f"{files[0]} has no examples: write at least one")
    first = parse(rows[0], rows.location(0))
    return ExampleFiles(rows, tuple(files), type(first), parse=parse)
