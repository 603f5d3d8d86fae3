"""Check programs that a released compiler computed wrongly."""

from collections.abc import Iterator

from jaxtrain.debug import BOUND, PROGRAMS, error
from parity.selftest.check_result import CheckResult, within


def programs() -> Iterator[CheckResult]:
    """Compare each program with NumPy."""
    for name, program in PROGRAMS.items():
        yield within(name, error(program), BOUND, "relative error")
