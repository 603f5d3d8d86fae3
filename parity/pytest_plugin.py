"""Parity checks as tests: mark a function that returns a `Case`.

    @pytest.mark.parity(precision=["fp64", "bf16"], accumulate=4)
    def test_my_port():
        return Case(…)

Every precision is checked; what differs fails the test with the verdict's lines. All checks are listed in one table at
the end, and written as `parity run --json` writes them to the file that `--parity-json` names.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "parity"
"""The user property under which a test's results travel to where the table is printed, also between processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-json F`."""
    group = parser.getgroup("parity", "JAX beside PyTorch")
    group.addoption("--parity-json", type=Path, metavar="F", help="write the parity checks' results there")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and the summary where results are gathered."""
    config.addinivalue_line(
        "markers",
        "parity(precision='fp64', **settings): the test returns a parity.Case, which parity.check then checks in each "
        "precision with these settings",
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(config.getoption("--parity-json")), "parity-summary")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Checks the case that a marked test returns."""
    marker = pyfuncitem.get_closest_marker("parity")
    if marker is None:
        return None
    from parity.case import Case

    settings = dict(marker.kwargs)
    precisions = settings.pop("precision", "fp64")
    names = pyfuncitem._fixtureinfo.argnames
    case = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if not isinstance(case, Case):
        pytest.fail(f"{pyfuncitem.name} returned {type(case).__name__}: make a test marked parity return a parity.Case")
    differing = []
    for precision in [precisions] if isinstance(precisions, str) else precisions:
        row, faults = _checked(case, precision, settings)
        pyfuncitem.user_properties.append((PROPERTY, row))
        differing += [f"{case.name} {precision}: {fault}" for fault in faults]
    if differing:
        pytest.fail("\n".join(differing), pytrace=False)
    return True


def _checked(case: Any, precision: str, settings: dict[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
    """The check as a row of `parity run --json`, and what differs."""
    from parity.report import Result, row
    from parity.run import Settings, examine

    examination = examine(case, precision, locate=True, **settings)
    return row(Result(case, precision, Settings(**settings), examination)), examination.verdict.lines


class _Summary:
    """Gathers results from reports, of this process and of pytest-xdist's workers."""

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
            from parity.report import gathered

            self._json_path.write_text(json.dumps(gathered(self._rows), indent=2, allow_nan=False) + "\n")


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a check, the failed ones last, where they are seen."""
    width = max(len(row["name"]) for row in rows)
    return [
        f"{row['name']:{width}}  {row['precision']:11}  k={row['accumulate']}  {_distance(row)}  "
        f"{'held' if row['passed'] else 'DIFFERS'}"
        for row in sorted(rows, key=lambda row: not row["passed"])
    ]


def _distance(row: dict[str, Any]) -> str:
    if row["precision"] == "fp64":
        return f"gradients {row['grad_rel_max'] or float('nan'):.1e} apart"
    return f"{row['error_ratio'] or float('nan'):.2f} × PyTorch's error"
