"""Rows of tables on disk: parquet and Arrow files, and what Hugging Face's `datasets` saved or loaded.

What a file says is not believed: every value is validated before it is made an object, because Arrow follows the
offsets of a damaged file out of its memory.
"""

import contextlib
import json
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.archive import check_expansion
from jaxtrain.data.files import files_under
from jaxtrain.data.rows import split_source
from jaxtrain.data.source import Example, Source
from jaxtrain.errors import UserError

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_CACHED = 256 * 2**20  # bytes of decoded row groups
_PIECE = 1024  # rows decoded at a time
_SAVED = ("dataset_dict.json", "state.json")  # what datasets.save_to_disk leaves in a folder
_LONGEST_JSON = 2**24  # bytes, of those
_ROWS_A_BYTE = 1000  # more than that of any file are not data
_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")


class ParquetRows:
    """Rows of parquet files, one after the other: item `i` is `{column: value}`, as `row_value` has values.

    Row groups are decoded when a row of theirs is asked for, and the last ones kept, up to `cache_bytes`. So memory
    is bounded; but where a file decodes to more than that, a shuffled pass decodes a group for almost every row: write
    such a file with small row groups, or as an Arrow file.

    Raises UserError for a file that is no parquet and for a column that is not there; on access, for a group that is
    damaged or decodes to far more than the file holds.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None, cache_bytes: int = _CACHED) -> None:
        parquet = _pyarrow("parquet")
        self.files, self.cache_bytes = tuple(files), cache_bytes
        self._groups: list[tuple[Path, int]] = []
        counts: list[int] = []
        for file in self.files:
            with _reading(file, "a parquet file"):
                metadata = parquet.read_metadata(file)
                names = metadata.schema.to_arrow_schema().names
                of_groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            columns = _present(names, columns, file)
            _check_count(min(of_groups, default=0), sum(of_groups), file)
            self._groups += [(file, g) for g in range(len(of_groups))]
            counts += of_groups
        self.columns = tuple(columns or ())
        self._ends = list(accumulate(counts))
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()  # loaders ask from several threads

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        with self._lock:
            table = self._decoded(group)
        return _row(table, index - start, f"row {index} of {self._groups[group][0]}")

    def __reduce__(self) -> Any:
        return ParquetRows, (self.files, self.columns, self.cache_bytes)

    def _decoded(self, group: int) -> Any:
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        file, number = self._groups[group]
        count = self._ends[group] - (self._ends[group - 1] if group else 0)
        self._cache[group] = _row_group(file, number, list(self.columns), count)
        while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > self.cache_bytes:
            self._cache.popitem(last=False)
        return self._cache[group]


class ArrowRows:
    """Rows of Arrow IPC files (Feather 2 is one; streams, too), mapped into memory and not read before they are asked
    for: items as those of `ParquetRows`. Of files written with compression the columns chosen are held in memory.

    Raises UserError for a file that is no Arrow file and for a column that is not there.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        arrow = _pyarrow()
        self.files = tuple(files)
        tables = []
        for file in self.files:
            table = _mapped(file)
            columns = _present(table.schema.names, columns, file)
            _check_count(table.num_rows, table.num_rows, file)
            tables.append(table.select(columns))
        self.columns = tuple(columns or ())
        try:
            self._table = arrow.concat_tables(tables)
        except arrow.ArrowInvalid as error:
            raise UserError(f"the tables differ ({_line(error)}): give files of the same columns and types") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _row(self._table, index, f"row {index} of {self.files[0].parent}")

    def __reduce__(self) -> Any:
        return ArrowRows, (self.files, self.columns)


class DatasetRows:
    """Rows of a `datasets.Dataset`, which maps its files into memory itself: items as those of `ParquetRows`.

    Raises UserError for a column that is not there.
    """

    def __init__(self, dataset: Any, columns: Sequence[str] | None = None) -> None:
        self.columns = tuple(_present(dataset.column_names, columns, "the dataset"))
        self.dataset = dataset.select_columns(list(self.columns)).with_format(None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self.dataset[index]
        return {name: row_value(row[name], f"{name!r} in row {index} of the dataset") for name in self.columns}


def table(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Source:
    """The rows of a parquet or Arrow file, of a folder of either, or of a dataset in a folder of `save_to_disk`.

    `columns` are those each row has; all of them by default.

        table("reviews.parquet", ["text", "stars"])[0]  # {"text": "…", "stars": np.int32(4)}

    Raises UserError if there is no table, if pyarrow is missing, and as the sources it returns.
    """
    root = Path(path)
    if (root / _SAVED[0]).exists():
        raise UserError(f"{root} holds several splits: give one of its sub-folders")
    if (root / _SAVED[1]).exists():
        return ArrowRows(_files_of_saved(root), columns)
    files = [root] if root.is_file() else files_under(root)
    of_kind = {
        kind: [f for f in files if f.suffix.lower() in suffixes]
        for kind, suffixes in ((ParquetRows, (".parquet",)), (ArrowRows, ARROW_SUFFIXES))
    }
    found = [(kind, files) for kind, files in of_kind.items() if files]
    if len(found) != 1:
        what = "both parquet and Arrow files" if found else "no table"
        raise UserError(f"{root} holds {what}: give a .parquet or {ARROW_SUFFIXES[0]} file or a folder of one kind")
    (kind, files), *_ = found
    return kind(files, columns)


def split_table(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, validation_fraction: float = 0.1
) -> tuple[Source, Source]:
    """A table's rows as (train, validation): the dataset's own splits where it was saved with them, otherwise drawn
    by index, a tenth for validation.

    Raises UserError as `table` does, and where a saved dataset has splits but not these.
    """
    root = Path(path)
    if not (root / _SAVED[0]).exists():
        return split_source(table(root, columns), validation_fraction)
    splits = _said(root / _SAVED[0], "splits", root)
    held_out = next((name for name in _VALIDATION_SPLITS if name in splits), None)
    if "train" not in splits or held_out is None:
        raise UserError(f"{root} has the splits {', '.join(splits)}: name them train and {_VALIDATION_SPLITS[0]}")
    return table(root / "train", columns), table(root / held_out, columns)


def is_table(path: Path) -> bool:
    """Whether `table` or `split_table` is for this path, rather than a reader of text or images.

    >>> is_table(Path("a.parquet")), is_table(Path("a.txt"))
    (True, False)
    """
    suffixes = {".parquet", *ARROW_SUFFIXES}
    if path.is_dir():
        return any((path / name).exists() for name in _SAVED) or any(f.suffix in suffixes for f in files_under(path))
    return path.suffix.lower() in suffixes


def row_value(value: Any, where: str) -> str | bytes | NDArray[Any] | np.generic:
    """A value as examples have it: text and bytes as they are; numbers and lists of them as numpy's, int32, float32 or
    bool.

    >>> row_value([1, 2], "here"), row_value("text", "here")
    (array([1, 2], dtype=int32), 'text')

    Raises UserError, saying where, for a missing value, for one that is neither, and for an integer beyond int32.
    """
    if isinstance(value, str | bytes):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        kind = "missing" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{where} is {kind}: give text, numbers or lists of numbers")
    if array.dtype.kind in "iu":
        bounds = np.iinfo(np.int32)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise UserError(f"{where} is {value}, beyond int32: give smaller numbers")
        return array.astype(np.int32)[()]
    return array[()] if array.dtype.kind == "b" else array.astype(np.float32)[()]


def _row(table: Any, row: int, where: str) -> Example:
    with _reading(where, "a row"):
        values = {}
        for name in table.schema.names:
            value = table.column(name).slice(row, 1)
            value.validate(full=True)
            values[name] = value[0].as_py()
    return {name: row_value(value, f"{name!r} in {where}") for name, value in values.items()}


def _row_group(file: Path, number: int, columns: list[str], count: int) -> Any:
    """The table of a row group of `count` rows, decoded in pieces: a little of a file can decode to anything."""
    arrow, size, pieces = _pyarrow(), 0, []
    with _reading(file, "a parquet file"), _pyarrow("parquet").ParquetFile(file) as opened:
        for piece in opened.iter_batches(_PIECE, row_groups=[number], columns=columns):
            size += piece.nbytes
            check_expansion(f"row group {number} of {file}", size, file.stat().st_size)
            pieces.append(piece)
    if (held := sum(piece.num_rows for piece in pieces)) != count:
        raise UserError(f"row group {number} of {file} has {held} rows where {count} are said to be: write it again")
    return arrow.Table.from_batches(pieces)


def _mapped(file: Path) -> Any:
    """The table of an IPC file or stream, on mapped memory."""
    arrow = _pyarrow()
    with _reading(file, "an Arrow file"):
        mapped = arrow.memory_map(str(file))
        try:
            opened = arrow.ipc.open_file(mapped)
        except arrow.ArrowInvalid:
            mapped.seek(0)
            opened = arrow.ipc.open_stream(mapped)
        table = opened.read_all()
        table.validate()
        table.schema.names  # noqa: B018, each is decoded, if it can be
        return table


def _files_of_saved(root: Path) -> list[Path]:
    """The files of a dataset saved in a folder, which are in it."""
    entries = _said(root / _SAVED[1], "_data_files", root, key="filename")
    return [root / name for name in entries]


def _said(file: Path, field: str, root: Path, key: str | None = None) -> list[str]:
    """The names that a JSON file lists under `field`, each under `key`. Raises UserError where one is no neighbour."""
    try:
        if file.stat().st_size > _LONGEST_JSON:
            raise ValueError(f"{file.stat().st_size:,} bytes")
        entries = json.loads(file.read_text("utf-8"))[field]
        names = [entry if key is None else entry[key] for entry in entries]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is none that datasets wrote ({_line(error)}): save the dataset again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (root / name).exists():
            raise UserError(f"{file} names {name!r}, which is not beside it: save the dataset again")
    return names


def _check_count(least: int, count: int, file: Path) -> None:
    if least < 0 or count > _ROWS_A_BYTE * file.stat().st_size:
        raise UserError(f"{file} is said to have {count:,} rows, more than it can: write it again")


@contextlib.contextmanager
def _reading(where: Any, what: str) -> Iterator[None]:
    """Raises UserError for what Arrow finds wrong within it."""
    arrow = _pyarrow()
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where} is not {what} that can be read ({_line(error)}): mend it") from None


def _present(names: Sequence[str], asked: Sequence[str] | None, where: Any) -> Sequence[str]:
    for column in asked or ():
        if column not in names:
            raise UserError(f"{where} has no column {column!r}, only {', '.join(names)}: name one of these")
    return names if asked is None else asked


def _pyarrow(module: str | None = None) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError("tables need pyarrow: pip install 'jaxtrain[data]'") from None
    return getattr(pyarrow, module) if module else pyarrow


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
