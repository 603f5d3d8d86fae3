"""What a check of the selftest has found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """`passed`, None where this machine has nothing to check; `said`, what was seen; where it is a number, the `figure`
    and the `bound` that it may not exceed."""

    name: str
    passed: bool | None
    said: str
    figure: float | None = None
    bound: float | None = None


def within(name: str, figure: float, bound: float, of: str) -> CheckResult:
    """A figure that holds up to its bound; one that is NaN does not. `of` says what it is.

    >>> within("product", 0.5, 1.0, "relative error").said
    'relative error 0.5, at most 1'
    >>> within("product", float("nan"), 1.0, "relative error").passed
    False
    """
    return CheckResult(
        name, bool(figure <= bound), f"{of} {figure:.2g}, at most {bound:.2g}", float(figure), float(bound)
    )
