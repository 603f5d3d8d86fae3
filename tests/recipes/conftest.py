"""Fixtures of the tasks' tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[[dict[str, list[Any]]], Path]:
    """Return a function that writes columns to a Parquet file and returns its path."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(columns: dict[str, list[Any]]) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet", row_group_size=8)
        return tmp_path / "table.parquet"

    return write


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder, without a cache of tokens and with lines of 100 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla")))
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    monkeypatch.setenv("COLUMNS", "100")
