"""Rows of tables on disk: parquet and Arrow files, and datasets of Hugging Face's `datasets`.

Files are not trusted: every value is validated before it is converted, because Arrow follows the offsets of a damaged
file out of its memory.

`pyarrow.dataset` and `datasets.load_dataset` were tried and not adopted. `take` of the former decodes a row group for
every row (7.2 ms per row, 0.27 ms here, for a file of 20 cached row groups), and it crashed the process for
3 of 12 damaged Arrow files, all of which are refused here. The latter is faster (0.01 ms per row) but first copies
the table uncompressed to disk (10 times the size of the file) and does not validate values.
"""

import contextlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.archive import check_expansion
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_CACHE_BYTES = 256 * 2**20  # decoded row groups
_BATCH_ROWS = 1024  # rows decoded at a time
_MAX_ROWS_PER_BYTE = 1000  # files of data have fewer


class ParquetRows:
    """Rows of parquet files, in order: item `i` is `{column: value}` with values as `row_value` converts them.

    Row groups are decoded on access, in several threads at once, and the most recently used ones are cached. If a file
    decodes to more than the cache holds, a shuffled pass decodes a group for almost every row: write such a file with
    small row groups, or as an Arrow file.

    Args:
      files: Parquet files.
      columns: Columns of a row; None for all.
      cache_bytes: Largest size of the cached row groups; the last one used is always cached.
      nested: Whether values are Python objects, which may be lists and dicts, instead of converted by `row_value`.

    Raises:
      UserError: A file is not parquet, or has no such column; on access, if a row group is damaged or decodes to far
        more than the size of the file.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str] | None = None,
        cache_bytes: int = _CACHE_BYTES,
        nested: bool = False,
    ) -> None:
        parquet = _pyarrow("parquet")
        self.files, self.cache_bytes, self.nested = tuple(files), cache_bytes, nested
        self._groups: list[tuple[Path, int]] = []
        counts: list[int] = []
        for file in self.files:
            with _reading(file, "a parquet file"):
                metadata = parquet.read_metadata(file)
                names = metadata.schema.to_arrow_schema().names
                group_rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            columns = _present(names, columns, file)
            _check_count(min(group_rows, default=0), sum(group_rows), file)
            self._groups += [(file, g) for g in range(len(group_rows))]
            counts += group_rows
        self.columns = tuple(columns or ())
        self._ends = list(accumulate(counts))
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()  # of the cache
        self._group_locks = [threading.Lock() for _ in self._groups]  # each held while its group is decoded

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        group = bisect_right(self._ends, index)
        start = self._ends[group - 1] if group else 0
        return _row(self._decoded(group), index - start, self.location(index), self.nested)

    def __reduce__(self) -> Any:
        return ParquetRows, (self.files, self.columns, self.cache_bytes, self.nested)

    def location(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"row {index} of {self._groups[bisect_right(self._ends, index)][0]}"

    def _decoded(self, group: int) -> Any:
        table = self._cached(group)
        if table is not None:
            return table
        with self._group_locks[group]:
            table = self._cached(group)  # another thread may have decoded it meanwhile
            if table is None:
                file, number = self._groups[group]
                count = self._ends[group] - (self._ends[group - 1] if group else 0)
                table = _row_group(file, number, list(self.columns), count)
                self._store(group, table)
        return table

    def _cached(self, group: int) -> Any:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
            return self._cache.get(group)

    def _store(self, group: int, table: Any) -> None:
        with self._lock:
            self._cache[group] = table
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > self.cache_bytes:
                self._cache.popitem(last=False)


class ArrowRows:
    """Rows of memory-mapped Arrow IPC files or streams, Feather 2 included: items as those of `ParquetRows`.

    Compressed files are decoded into memory as a whole.

    Args:
      files: Arrow files with equal columns and types.
      columns: Columns of a row; None for all.
      nested: As that of `ParquetRows`.

    Raises:
      UserError: A file is not Arrow, has no such column, or differs from the others in its columns.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None, nested: bool = False) -> None:
        arrow = _pyarrow()
        self.files, self.nested = tuple(files), nested
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
            raise UserError(
                f"the tables differ ({first_line(error)}): use files with the same columns and types"
            ) from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _row(self._table, index, self.location(index), self.nested)

    def __reduce__(self) -> Any:
        return ArrowRows, (self.files, self.columns, self.nested)

    def location(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"row {index} of {self.files[0].parent}"


class DatasetRows:
    """Rows of a `datasets.Dataset`: items as those of `ParquetRows`.

    Args:
      dataset: Dataset.
      columns: Columns of a row; None for all.

    Raises:
      UserError: There is no such column.
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


def row_value(value: Any, where: str) -> str | bytes | NDArray[Any] | np.generic:
    """Convert a value of a table to one of an example.

    Args:
      value: Text, bytes, a number, or lists of numbers.
      where: Location of the value, for messages.

    Returns:
      Text and bytes as they are; numbers as numpy values or arrays of int32, float32 or bool.

    Raises:
      UserError: The value is missing, of another kind, an integer beyond int32, or a number beyond float32.

    Example:
      >>> row_value([1, 2], "here"), row_value("text", "here")
      (array([1, 2], dtype=int32), 'text')
    """
    if isinstance(value, str | bytes):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        kind = "missing" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{where} is {kind}: use text, numbers or lists of numbers")
    if array.dtype.kind in "iu":
        bounds = np.iinfo(np.int32)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise UserError(f"{where} is {value}, beyond int32: use smaller numbers")
        return array.astype(np.int32)[()]
    if array.dtype.kind == "b":
        return array[()]
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if (lost := np.isfinite(array) & ~np.isfinite(narrow)).any():
        raise UserError(f"{where} is {array[lost].flat[0]}, beyond float32: use smaller numbers")
    return narrow[()]


def _row(table: Any, row: int, where: str, nested: bool) -> Example:
    with _reading(where, "a row"):
        values = {}
        for name in table.schema.names:
            value = table.column(name).slice(row, 1)
            value.validate(full=True)
            values[name] = value[0].as_py()
    return values if nested else {name: row_value(value, f"{name!r} in {where}") for name, value in values.items()}


def _row_group(file: Path, number: int, columns: list[str], count: int) -> Any:
    """Decode a row group of `count` rows, in batches, because a small file can decode to any size."""
    arrow, size, pieces = _pyarrow(), 0, []
    with _reading(file, "a parquet file"), _pyarrow("parquet").ParquetFile(file) as opened:
        for piece in opened.iter_batches(_BATCH_ROWS, row_groups=[number], columns=columns):
            size += piece.nbytes
            check_expansion(f"row group {number} of {file}", size, file.stat().st_size)
            pieces.append(piece)
    if (rows := sum(piece.num_rows for piece in pieces)) != count:
        raise UserError(f"row group {number} of {file} has {rows} rows, {count} by its header: write it again")
    return arrow.Table.from_batches(pieces)


def _mapped(file: Path) -> Any:
    """Open an IPC file or stream in mapped memory."""
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
        table.schema.names  # noqa: B018, decodes every name
        return table


def _check_count(least: int, count: int, file: Path) -> None:
    if least < 0 or count > _MAX_ROWS_PER_BYTE * file.stat().st_size:
        raise UserError(f"{file} has {count:,} rows by its header, too many for its size: write it again")


@contextlib.contextmanager
def _reading(where: Any, what: str) -> Iterator[None]:
    """Raise errors of Arrow in the body of the `with` as UserError."""
    arrow = _pyarrow()
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where} is not {what} that can be read ({first_line(error)}): fix it") from None


def _present(names: Sequence[str], columns: Sequence[str] | None, where: Any) -> Sequence[str]:
    for column in columns or ():
        if column not in names:
            raise UserError(f"{where} has no column {column!r}, only {', '.join(names)}: name one of these")
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise UserError(f"{where} has two columns {twice!r}: rename one")
    return names if columns is None else columns


def _pyarrow(module: str | None = None) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError("tables need pyarrow: pip install 'jaxtrain[data]'") from None
    return getattr(pyarrow, module) if module else pyarrow


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
