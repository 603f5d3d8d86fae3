"""Opening of tables on disk: which files and which splits of a path are read."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxtrain.data.files.listing import check_content, files_under
from jaxtrain.data.files.splits import VALIDATION_SPLITS, files_of_splits, names_except
from jaxtrain.data.sources import Example, MappedSource, Source, split_source
from jaxtrain.data.tables.table_rows import ARROW_SUFFIXES, ArrowRows, ParquetRows, first_line
from jaxtrain.errors import UserError
from jaxtrain.records import report_unread

_SAVED = ("dataset_dict.json", "state.json")  # files of datasets.save_to_disk
_MAX_JSON_BYTES = 2**24


def table(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, *, nested: bool = False
) -> ArrowRows | ParquetRows:
    """Open a parquet or Arrow file, a folder of either, or a dataset that `save_to_disk` wrote.

        table("reviews.parquet", ["text", "stars"])[0]  # {"text": "…", "stars": np.int32(4)}

    Args:
      path: File or folder.
      columns: Columns of a row; None for all.
      nested: Whether values are Python objects, which may be lists and dicts, instead of text, numbers and arrays.

    Returns:
      The rows, a source.

    Raises:
      UserError: There is no table, or several splits; pyarrow is not installed, or as the source returned.
    """
    root = Path(path)
    if (root / _SAVED[0]).exists():
        raise UserError(f"{root} has several splits: use one of its sub-folders")
    if (root / _SAVED[1]).exists():
        return ArrowRows(_files_of_saved(root), columns, nested=nested)
    files = _table_files(root)
    if files_of_splits(files, root):
        raise UserError(f"{root} has several splits: use one of its files or sub-folders")
    return opened_table(files, columns, nested=nested)


def _table_files(root: Path) -> list[Path]:
    """Return the parquet or Arrow files of a path, all of one kind, and name the other files of a folder."""
    files = [root] if root.is_file() else files_under(root)
    of_kind = ([f for f in files if f.suffix.lower() in suffixes] for suffixes in ((".parquet",), ARROW_SUFFIXES))
    found = [of_one for of_one in of_kind if of_one]
    if len(found) != 1:
        what = "both parquet and Arrow files" if found else "no table"
        raise UserError(f"{root} has {what}: use a .parquet or {ARROW_SUFFIXES[0]} file or a folder of one kind")
    report_unread(root, names_except(files, found[0], root), what="files")
    return found[0]


def opened_table(
    files: Sequence[Path], columns: Sequence[str] | None = None, *, nested: bool = False
) -> ArrowRows | ParquetRows:
    """Open parquet or Arrow files, all of one kind, as `table` does."""
    for file in files:
        check_content(file)
    kind = ParquetRows if files[0].suffix.lower() == ".parquet" else ArrowRows
    return kind(files, columns, nested=nested)


def split_table(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, validation_fraction: float = 0.1
) -> tuple[Source, Source]:
    """Open a table as (train, validation): its splits, or a random split by index.

    The splits are those of a saved dataset, or of a folder in which files or sub-folders are named `train` and
    `validation` (or `valid`, `val`, `dev`, `eval`, `test`), such as `train-00000-of-00002.parquet`.

    Args:
      path: File or folder.
      columns: Columns of a row; None for all.
      validation_fraction: Fraction that is held out, for tables without splits.

    Raises:
      UserError: As `table`; or a saved dataset has splits, but not these.
    """
    if saved := saved_splits(Path(path)):
        return table(saved[0], columns), table(saved[1], columns)
    if named := table_splits(Path(path)):
        return opened_table(named[0], columns), opened_table(named[1], columns)
    return split_source(table(path, columns), validation_fraction)


def table_splits(path: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files of the splits (train, validation) that the names in a folder of tables say; None without any."""
    if path.is_file() or not is_table(path) or (path / _SAVED[1]).exists():
        return None
    files = _table_files(path)
    splits = files_of_splits(files, path)
    if splits is not None:
        report_unread(path, names_except(files, [*splits[0], *splits[1]], path), what="files")
    return splits


def saved_splits(path: Path) -> tuple[Path, Path] | None:
    """Return the folders of the splits (train, validation) of a saved dataset; None if it has no splits.

    Raises:
      UserError: It has splits, but not these.
    """
    if not (path / _SAVED[0]).exists():
        return None
    splits = _read_names(path / _SAVED[0], "splits", path)
    held_out = next((name for name in VALIDATION_SPLITS if name in splits), None)
    if "train" not in splits or held_out is None:
        raise UserError(f"{path} has the splits {', '.join(splits)}: name them train and {VALIDATION_SPLITS[0]}")
    report_unread(path, {*splits} - {"train", held_out}, what="splits")
    return path / "train", path / held_out


def split_columns(path: str | os.PathLike[str], columns: Mapping[str, str]) -> tuple[Source, Source]:
    """Open columns of a table under other names, as (train, validation), split as by `split_table`.

    Args:
      path: File or folder.
      columns: Column by its name in an example.

    Returns:
      Two sources of examples {name: value of the column}.

    Raises:
      UserError: As `split_table`.
    """
    train, validation = split_table(path, [*columns.values()])
    rename = partial(_rename, dict(columns))
    return MappedSource(train, rename), MappedSource(validation, rename)


def _rename(columns: Mapping[str, str], row: Example) -> Example:
    return {name: row[column] for name, column in columns.items()}


def is_table(path: Path) -> bool:
    """Return whether a path is a table, rather than text or images.

    Example:
      >>> is_table(Path("a.parquet")), is_table(Path("a.txt"))
      (True, False)
    """
    suffixes = {".parquet", *ARROW_SUFFIXES}
    if path.is_dir():
        return any((path / name).exists() for name in _SAVED) or any(f.suffix in suffixes for f in files_under(path))
    return path.suffix.lower() in suffixes


def _files_of_saved(root: Path) -> list[Path]:
    """Return the files of a saved dataset."""
    entries = _read_names(root / _SAVED[1], "_data_files", root, key="filename")
    return [root / name for name in entries]


def _read_names(file: Path, field: str, root: Path, key: str | None = None) -> list[str]:
    """Return the names that a JSON file lists under `field`, each under `key`. They must exist in its folder."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{file.stat().st_size:,} bytes")
        entries = json.loads(file.read_text("utf-8"))[field]
        names = [entry if key is None else entry[key] for entry in entries]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} was not written by datasets ({first_line(error)}): save the dataset again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (root / name).exists():
            raise UserError(f"{file} names {name!r}, which is not in its folder: save the dataset again")
    return names
