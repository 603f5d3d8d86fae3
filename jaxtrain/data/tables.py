"""Rows of tables on disk: parquet and Arrow files, and what Hugging Face's `datasets` saved or loaded."""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files import files_under
from jaxtrain.data.rows import split_source
from jaxtrain.data.source import Example, Source
from jaxtrain.errors import UserError

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_CACHED = 256 * 2**20  # bytes of decoded row groups
_SAVED = ("dataset_dict.json", "state.json")  # what datasets.save_to_disk leaves in a folder
_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")


class ParquetRows:
    """Rows of parquet files, one after the other: item `i` is `{column: value}`, as `row_value` has values.

    Row groups are decoded when a row of theirs is asked for, and the last ones kept, up to `cache_bytes`. So memory
    is bounded; but where a file decodes to more than that, a shuffled pass decodes a group for almost every row: write
    such a file with small row groups, or as an Arrow file.

    Raises UserError for a file that is no parquet and for a column that is not there.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None, cache_bytes: int = _CACHED) -> None:
        parquet = _pyarrow("parquet")
        self.files, self.cache_bytes = tuple(files), cache_bytes
        self._groups: list[tuple[Path, int]] = []
        counts: list[int] = []
        for file in self.files:
            try:
                metadata = parquet.read_metadata(file)
            except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
                raise UserError(f"{file} is not a parquet file that can be read ({_line(error)}): mend it") from None
            columns = _present(metadata.schema.to_arrow_schema().names, columns, file)
            self._groups += [(file, g) for g in range(metadata.num_row_groups)]
            counts += [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
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
        with _pyarrow("parquet").ParquetFile(file) as opened:
            self._cache[group] = opened.read_row_group(number, columns=list(self.columns))
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

    Raises UserError if there is no table, if pyarrow (or datasets) is missing, and as the sources it returns.
    """
    root = Path(path)
    if (root / _SAVED[0]).exists():
        raise UserError(f"{root} holds several splits: give one of its sub-folders")
    if (root / _SAVED[1]).exists():
        return DatasetRows(_datasets().load_from_disk(str(root)), columns)
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
    splits = _datasets().load_from_disk(str(root))
    held_out = next((name for name in _VALIDATION_SPLITS if name in splits), None)
    if "train" not in splits or held_out is None:
        raise UserError(f"{root} has the splits {', '.join(splits)}: name them train and {_VALIDATION_SPLITS[0]}")
    return DatasetRows(splits["train"], columns), DatasetRows(splits[held_out], columns)


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
    names = table.schema.names
    return {n: row_value(table.column(n)[row].as_py(), f"{n!r} in {where}") for n in names}


def _mapped(file: Path) -> Any:
    """The table of an IPC file or stream, on mapped memory."""
    arrow = _pyarrow()
    try:
        mapped = arrow.memory_map(str(file))
        try:
            return arrow.ipc.open_file(mapped).read_all()
        except arrow.ArrowInvalid:
            mapped.seek(0)
            return arrow.ipc.open_stream(mapped).read_all()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not an Arrow file that can be read ({_line(error)}): mend it") from None


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


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("a saved dataset needs datasets: pip install 'jaxtrain[data]'") from None
    return datasets


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
