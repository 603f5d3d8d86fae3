"""Part 1: programs that released compilers computed wrongly, then the tests that need a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.lines import emit
from jaxtrain.debug import BOUND, PROGRAMS, error

ROOT = Path(__file__).parents[2]


class Lines:
    """A pytest plugin that prints a result for each test."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Print the outcome of the call, or of what stood in its way."""
        if report.when == "call" or report.outcome != "passed":
            print()  # pytest's own lines have no end yet
            reason = report.longreprtext.strip().splitlines()[-1:] if report.failed else []
            emit("test", test=report.nodeid, outcome=report.outcome, seconds=report.duration, reason="".join(reason))


def main() -> int:
    """Print a result for each program and each test; return 1 if one is wrong."""
    wrong = False
    for name, program in PROGRAMS.items():
        found = error(program)
        wrong |= not found <= BOUND
        emit("compiled program", program=name, relative_error=found, bound=BOUND, right=found <= BOUND)
    arguments = ["-q", "-p", "no:cacheprovider", "-n0", "-m", "gpu", "--tier", "all", str(ROOT / "tests" / "gpu")]
    return int(pytest.main(arguments, plugins=[Lines()]) != pytest.ExitCode.OK or wrong)


if __name__ == "__main__":
    sys.exit(main())
