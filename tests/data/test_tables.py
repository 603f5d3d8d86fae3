"""Rows of parquet and Arrow files and of saved datasets, in any order of access."""

import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import ParquetRows, is_table, split_source, split_table, table
from jaxtrain.data.loader import Loader
from jaxtrain.data.tables import table_rows
from jaxtrain.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
feather, parquet = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow.parquet")


def columns(count: int, first: int = 0) -> Any:
    numbers = list(range(first, first + count))
    return pyarrow.table(
        {
            "text": [f"row {i}" for i in numbers],
            "label": numbers,
            "score": [i / 2 for i in numbers],
            "vector": [[i, i + 1] for i in numbers],
            "flag": [i % 2 == 0 for i in numbers],
        }
    )


def write_parquet(path: Path, rows: Any) -> None:
    parquet.write_table(rows, path, row_group_size=4)


def write_feather(path: Path, rows: Any) -> None:
    feather.write_feather(rows, path, compression="uncompressed", chunksize=4)


def write_stream(path: Path, rows: Any) -> None:
    with pyarrow.ipc.new_stream(path, rows.schema) as stream:
        stream.write_table(rows, max_chunksize=4)


def write_dataset(path: Path, rows: Any) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(rows).save_to_disk(path)


WRITERS = {"a.parquet": write_parquet, "a.feather": write_feather, "a.arrow": write_stream, "saved": write_dataset}


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    WRITERS[request.param](tmp_path / request.param, columns(10))
    return tmp_path / request.param


def test_rows_are_read_in_any_order(path: Path) -> None:
    rows = table(path)
    assert len(rows) == 10
    for i in (7, 0, 9, 3, 4):
        row = rows[i]
        assert row["text"] == f"row {i}"
        assert (row["label"], row["score"], row["flag"]) == (i, i / 2, i % 2 == 0)
        assert row["vector"].tolist() == [i, i + 1]
        assert [row[n].dtype for n in ("label", "score", "vector", "flag")] == [np.int32, np.float32, np.int32, bool]
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            rows[outside]


def test_columns_are_chosen_by_name(path: Path) -> None:
    assert table(path, ["label", "text"])[2] == {"label": 2, "text": "row 2"}
    with pytest.raises(UserError, match="has no column 'colour', only text, label, score, vector, flag"):
        table(path, ["colour"])


def test_tables_can_be_pickled(path: Path) -> None:
    rows = table(path, ["label"])
    rows[5]
    assert pickle.loads(pickle.dumps(rows))[6] == {"label": 6}


def test_a_shuffled_loader_reads_every_row_of_a_table(path: Path) -> None:
    loader = Loader(table(path, ["label", "vector"]), batch_size=5, seed=3)
    epoch = [next(loader) for _ in range(2)]
    assert sorted(np.concatenate([batch["label"] for batch in epoch]).tolist()) == list(range(10))
    assert all((batch["vector"][:, 0] == batch["label"]).all() for batch in epoch)


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_a_folder_of_files_is_one_table(tmp_path: Path, name: str) -> None:
    write: Callable[..., None] = WRITERS[name]
    write(tmp_path / f"0{name}", columns(3))
    write(tmp_path / f"1{name}", columns(6, first=3))
    (tmp_path / "readme.txt").write_text("not a table")
    with pytest.warns(UserWarning, match=r"has files that are not read: readme\.txt$"):
        rows = table(tmp_path)
    assert [rows[i]["label"] for i in range(len(rows))] == list(range(9))


def test_the_parquet_cache_keeps_only_row_groups_that_fit(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns(12))
    one_group = parquet.ParquetFile(tmp_path / "a.parquet").read_row_group(0).nbytes
    rows = ParquetRows([tmp_path / "a.parquet"], cache_bytes=one_group * 5 // 2)
    for i in (0, 5, 1, 11):
        assert rows[i]["label"] == i
    assert list(rows._cache) == [0, 2]  # the most recently used
    narrow = ParquetRows([tmp_path / "a.parquet"], ["label"], cache_bytes=0)
    assert [narrow[i]["label"] for i in (9, 3, 9)] == [9, 3, 9]
    assert list(narrow._cache) == [2]
    assert narrow._cache[2].column_names == ["label"]


def test_parquet_rows_can_be_read_by_several_threads(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", columns(200))
    rows = ParquetRows([tmp_path / "a.parquet"], ["label"], cache_bytes=200)
    indices = np.random.RandomState(0).randint(200, size=2000).tolist()
    with ThreadPoolExecutor(4) as threads:
        assert [int(row["label"]) for row in threads.map(rows.__getitem__, indices)] == indices


def test_a_row_group_is_decoded_once_without_blocking_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", columns(12))
    rows = ParquetRows([tmp_path / "a.parquet"], ["label"])
    decoded, resume, decode = [], threading.Event(), table_rows._row_group

    def slow_for_the_second(file: Path, number: int, *args: Any) -> Any:
        decoded.append(number)
        assert number != 1 or resume.wait(20)
        return decode(file, number, *args)

    monkeypatch.setattr(table_rows, "_row_group", slow_for_the_second)
    assert int(rows[0]["label"]) == 0
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(rows.__getitem__, i) for i in (4, 5)]
        try:
            others = [threads.submit(rows.__getitem__, i) for i in (1, 8)]
            assert [int(other.result(timeout=5)["label"]) for other in others] == [1, 8]
        finally:
            resume.set()
        assert [int(row.result()["label"]) for row in waiting] == [4, 5]
    assert sorted(decoded) == [0, 1, 2]


@settings(max_examples=20)
@given(st.integers(2, 60), st.sampled_from([0.01, 0.1, 0.5, 0.99]))
def test_a_split_assigns_every_row_to_one_side(count: int, fraction: float) -> None:
    train, validation = split_source([{"label": i} for i in range(count)], fraction)
    train_labels, validation_labels = ([part[i]["label"] for i in range(len(part))] for part in (train, validation))
    assert sorted(train_labels + validation_labels) == list(range(count))
    assert train_labels == sorted(train_labels)
    assert len(validation_labels) == min(max(1, round(count * fraction)), count - 1)


def test_a_split_holds_out_the_same_rows_in_every_release(path: Path) -> None:
    _, validation = split_table(path, ["label"], 0.3)
    assert [int(validation[i]["label"]) for i in range(len(validation))] == [2, 4, 8]


def test_a_saved_dataset_keeps_its_own_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset(columns(4)), "test": datasets.Dataset(columns(2, first=4))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    train, validation = split_table(tmp_path / "saved", ["label"])
    assert ([train[i]["label"] for i in range(4)], [validation[i]["label"] for i in range(2)]) == ([0, 1, 2, 3], [4, 5])
    with pytest.raises(UserError, match="several splits"):
        table(tmp_path / "saved")
    datasets.DatasetDict({"train": parts["train"]}).save_to_disk(tmp_path / "alone")
    with pytest.raises(UserError, match="has the splits train: name them train and validation"):
        split_table(tmp_path / "alone")


def test_unsupported_values_are_reported(tmp_path: Path) -> None:
    kinds: dict[str, list] = {"missing": [None, "a"], "large": [2**31, 0], "beyond": [[1.0, -1e300], [0.0]]}
    kinds |= {"nested": [{"a": 1}, {"a": 2}], "ragged": [[[1], [2, 3]], [[1]]]}
    parquet.write_table(pyarrow.table(kinds), tmp_path / "a.parquet")
    for name, message in {
        "missing": "is missing",
        "nested": "is a dict",
        "ragged": "is a list",
        "large": "is 2147483648, beyond int32",
        "beyond": r"is -1e\+300, beyond float32",
    }.items():
        with pytest.raises(UserError, match=rf"'{name}' in row 0 of .*a\.parquet {message}"):
            table(tmp_path / "a.parquet", [name])[0]


def test_invalid_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    (tmp_path / "a.arrow").write_text("no arrow")
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(UserError, match=rf"{name} is not an? \w+ file that can be read"):
            table(tmp_path / name)
    (tmp_path / "b.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(UserError, match=r"b\.parquet is a pointer of Git LFS to a file that was not downloaded"):
        table(tmp_path / "b.parquet")
    with pytest.raises(UserError, match="has both parquet and Arrow files"):
        table(tmp_path)
    with pytest.raises(UserError, match="has no table"):
        table(tmp_path / "nowhere")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet has two columns 'a': rename one"):
        table(tmp_path / "twice.parquet")
    (tmp_path / "b").mkdir()
    write_feather(tmp_path / "b/1.arrow", columns(2))
    write_feather(tmp_path / "b/2.arrow", pyarrow.table({"label": ["text"]}))
    with pytest.raises(UserError, match="use files with the same columns and types"):
        table(tmp_path / "b", ["label"])


def test_tables_without_pyarrow_raise_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", columns(2))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"tables need pyarrow: pip install 'jaxtrain\[data\]'"):
        table(tmp_path / "a.parquet")


def test_tables_are_distinguished_from_other_data(path: Path, tmp_path: Path) -> None:
    assert is_table(path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text")
    assert not is_table(tmp_path / "texts")
    assert not is_table(tmp_path / "texts/a.txt")
