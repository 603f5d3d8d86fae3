"""The result of one check of the selftest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
      name: Name of the check.
      passed: Whether it passed; None if this machine has nothing to check.
      detail: What was observed, in one line.
      figure: The measured number, if there is one.
      bound: Its upper bound.
    """

    name: str
    passed: bool | None
    detail: str
    figure: float | None = None
    bound: float | None = None


def within(name: str, figure: float, bound: float, of: str) -> CheckResult:
    """Return a result that passes if `figure`, described by `of`, is at most `bound`; NaN fails.

    >>> within("product", 0.5, 1.0, "relative error").detail
    'relative error 0.5, at most 1'
    >>> within("product", float("nan"), 1.0, "relative error").passed
    False
    """
    return CheckResult(
        name, bool(figure <= bound), f"{of} {figure:.2g}, at most {bound:.2g}", float(figure), float(bound)
    )
