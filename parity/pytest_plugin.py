"""Parity checks as tests: mark a function that returns a `Case`.

    @pytest.mark.parity(precision=["fp64", "bf16"], accumulate=4)
    def test_my_port():
        return Case(…)

Every precision is checked, and a difference fails the test with the lines of the verdict. All checks are listed at the
end of the session, and `--parity-json` writes them in the format of `parity run --json`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parity.settings import in_double

PROPERTY = "parity"
"""User property that carries a test's results to the process that prints the table."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--parity-json F`."""
    group = parser.getgroup("parity", "JAX compared with PyTorch")
    group.addoption("--parity-json", type=Path, metavar="F", help="write the results of the parity checks as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and, in the main process, the summary."""
    config.addinivalue_line(
        "markers",
        "parity(precision='fp64', **settings): the test returns a parity.Case, which parity.check then checks in each "
        "precision with these settings",
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(config.getoption("--parity-json")), "parity-summary")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Check the case that a marked test returns."""
    marker = pyfuncitem.get_closest_marker("parity")
    if marker is None:
        return None
    from parity.case import Case

    settings = dict(marker.kwargs)
    precisions = settings.pop("precision", "fp64")
    names = pyfuncitem._fixtureinfo.argnames
    case = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if not isinstance(case, Case):
        pytest.fail(f"{pyfuncitem.name} returned {type(case).__name__}: a test marked parity must return a parity.Case")
    differing = []
    for precision in [precisions] if isinstance(precisions, str) else precisions:
        row, faults = _checked(case, precision, settings)
        pyfuncitem.user_properties.append((PROPERTY, row))
        differing += [f"{case.name} {precision}: {fault}" for fault in faults]
    if differing:
        pytest.fail("\n".join(differing), pytrace=False)
    return True


def _checked(case: Any, precision: str, settings: dict[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
    """The check as a row of `parity run --json`, and the lines of what differs."""
    from parity.report import Result, row
    from parity.run import examine
    from parity.settings import settings_of

    examination = examine(case, precision, locate=True, **settings)
    return row(Result(case, precision, settings_of(case, **settings), examination)), examination.verdict.lines


class _Summary:
    """Collects results from the reports of this process and of pytest-xdist's workers."""

    def __init__(self, json_path: Path | None) -> None:
        self._json_path = json_path
        self._rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            found: list[Any] = [value for name, value in report.user_properties if name == PROPERTY]
            self._rows += found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._rows:
            return
        terminalreporter.section("parity")
        for line in _lines(self._rows):
            terminalreporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        if self._rows and self._json_path is not None:
            from parity.report import document_of_rows

            self._json_path.write_text(json.dumps(document_of_rows(self._rows), indent=2, allow_nan=False) + "\n")


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each check, the failed ones last."""
    width, of_precision = (max(len(row[key]) for row in rows) for key in ("name", "precision"))
    return [
        f"{row['name']:{width}}  {row['precision']:{of_precision}}  k={row['accumulate']}  {_distance(row)}  "
        f"{'held' if row['passed'] else 'DIFFERS'}"
        for row in sorted(rows, key=lambda row: not row["passed"])
    ]


def _distance(row: dict[str, Any]) -> str:
    if in_double(row["precision"]):
        return f"gradients {row['grad_rel_max'] or float('nan'):.1e} apart"
    return f"{row['error_ratio'] or float('nan'):.2f} × PyTorch's error"
