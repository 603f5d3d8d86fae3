"""A pytest plugin that records which lines of the sources each test executes.

Python reports a line's first execution in a test, and then no more (PEP 669), so that tests take little longer.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = tuple(f"{ROOT / folder}{os.sep}" for folder in ("jaxtrain", "parity", "benchmarks"))
PATH = "MUTATION_REACH"
"""Environment variable with the file that the lines are written to, as {test: {file: [line, …]}}."""


class Reach:
    """The lines of each test of a session, those that run while modules are imported excepted."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, set[int]]] = {}
        self._now: dict[str, set[int]] = defaultdict(set)
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "reach")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(SOURCES) and code.co_name != "<module>":
            self._now[code.co_filename].add(line)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Collect the lines of a test."""
        self._now = defaultdict(set)
        sys.monitoring.restart_events()  # type: ignore[attr-defined]
        found = yield
        self._lines[item.nodeid] = dict(self._now)
        return found

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note the laws that do not run: of their lines nothing is known."""
        laws = (item for item in items if item.get_closest_marker("law") and not item.get_closest_marker("nightly"))
        self._lines |= {item.nodeid: {} for item in laws}

    def pytest_sessionfinish(self) -> None:
        """Write the lines."""
        found = {
            test: {Path(file).relative_to(ROOT).as_posix(): sorted(lines) for file, lines in files.items()}
            for test, files in self._lines.items()
        }
        Path(os.environ[PATH]).write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    """Record in this process."""
    config.pluginmanager.register(Reach())
