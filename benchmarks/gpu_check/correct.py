"""Part 1: programs that released compilers computed wrongly, then the tests that need a GPU."""

import os
import subprocess
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


def tests() -> int:
    """Run the tests that need a GPU, and print a result for each; return pytest's exit status."""
    arguments = ["-q", "-p", "no:cacheprovider", "-n0", "-m", "gpu", "--tier", "all", str(ROOT / "tests" / "gpu")]
    return int(pytest.main(arguments, plugins=[Lines()]))


def main() -> int:
    """Print a result for each program and each test; return 1 if one is wrong."""
    wrong = False
    for name, program in PROGRAMS.items():
        found = error(program)
        wrong |= not found <= BOUND
        emit("compiled program", program=name, relative_error=found, bound=BOUND, right=found <= BOUND)
    # In a process of their own, whose settings are those of the tests, which choose a CPU by default.
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or "cuda"}
    command = [sys.executable, "-m", "benchmarks.gpu_check.correct", "tests"]
    return int(subprocess.run(command, env=environment, check=False).returncode != 0 or wrong)


if __name__ == "__main__":
    sys.exit(tests() if "tests" in sys.argv else main())
