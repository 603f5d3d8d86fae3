"""Tables of texts to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[[dict[str, list[Any]]], Path]:
    """Write columns as a parquet file, and say where."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(columns: dict[str, list[Any]]) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet", row_group_size=8)
        return tmp_path / "table.parquet"

    return write
