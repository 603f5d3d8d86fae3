"""Write the tier of every test that docs/guarantees.md names: `python -m docs.tiers`.

A mark `slow` or `nightly` of the module, the function or a parameter selects the tier in which a case of a test runs;
of a `sampled` test the first cases run by default, further ones in the slow tier, and with `slow=` the others nightly.
"""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "guarantees.md"
TIERS = ("default", "slow", "nightly")
ROW = re.compile(r"^\| `(tests/[\w/]+\.py)::(\w+)` \| ([\w, ]*) \|$", re.M)


def tiers(path: str, function: str) -> str:
    """Return the tiers in which the cases of a test run, as in "default, slow".

    Args:
      path: File of the test, relative to the repository, such as "tests/step/test_clip.py".
      function: Name of the test.
    """
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = [mark for owner in (module, getattr(module, function)) for mark in _marks(owner)]
    ranks = {_rank(marks)}
    for mark in marks:
        if mark.name == "parametrize":
            values = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
            of_values = {_rank(getattr(value, "marks", ())) for value in values}
            ranks = {max(a, b) for a in ranks for b in of_values}
    for mark in marks:
        if mark.name == "sampled":
            ranks = (ranks if mark.args[0] else ranks - {TIERS.index("default")}) | {TIERS.index("slow")}
            ranks |= {TIERS.index("nightly")} if "slow" in mark.kwargs else set()
    return ", ".join(TIERS[rank] for rank in sorted(ranks))


def with_tiers(page: str) -> str:
    """Return the page with the current tier in the row of each test."""
    return ROW.sub(lambda row: f"| `{row[1]}::{row[2]}` | {tiers(row[1], row[2])} |", page)


def _marks(owner: Any) -> list[Any]:
    marks = getattr(owner, "pytestmark", [])
    return list(marks) if isinstance(marks, list) else [marks]


def _rank(marks: Iterable[Any]) -> int:
    return max((TIERS.index(mark.name) for mark in marks if mark.name in TIERS), default=0)


if __name__ == "__main__":
    importlib.import_module("conftest")  # sets the number of devices before JAX is imported
    PAGE.write_text(with_tiers(PAGE.read_text()))
