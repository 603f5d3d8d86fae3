"""How both sides of a check train."""

from dataclasses import dataclass
from typing import Any

from parity.case import Case

FP8 = ("fp8", "fp8_delayed", "fp8_row", "fp8_block")
EXACT = "fp64_"
"""Prefix of a precision whose quantization to fp8 both sides compute in float64 like all the rest: only the rounding to
fp8 itself remains, so that the two programs must be equal to the bars of fp64."""
BF16_PARAMS = ("bf16_params", "bf16_params_stochastic", "bf16_params_kahan")
PRECISIONS = (
    *("fp64", "fp32", "bf16", "fp16", "bf16_compute"),
    *BF16_PARAMS,
    *FP8,
    *(EXACT + name for name in FP8),
)


def fp8_policy(precision: str) -> str | None:
    """Return the name of the fp8 policy of a precision; None if it has none.

    >>> fp8_policy("fp64_fp8_row"), fp8_policy("fp8"), fp8_policy("fp64")
    ('fp8_row', 'fp8', None)
    """
    name = precision.removeprefix(EXACT)
    return name if name in FP8 else None


def in_double(precision: str) -> bool:
    """Return whether both sides compute in float64.

    >>> in_double("fp64"), in_double("fp64_fp8"), in_double("fp8")
    (True, True, False)
    """
    return precision == "fp64" or precision.startswith(EXACT)


@dataclass(frozen=True)
class Settings:
    """How both sides train.

    Attributes:
      accumulate: Micro-batches per accumulation window.
      remat: JAX's rematerialization policy.
      steps: Windows, each with one optimizer update.
      seed: Seed of weights, data and dropout.
    """

    accumulate: int = 1
    remat: str = "none"
    steps: int = 20
    seed: int = 0


def settings_of(case: Case, **given: Any) -> Settings:
    """Return the settings of a check: those given, else the case's own, else the defaults.

    >>> from parity.cases import CASES
    >>> settings_of(CASES["mlp"](), accumulate=2)
    Settings(accumulate=2, remat='none', steps=20, seed=0)
    """
    return Settings(**{**case.settings, **given})


def left_out(case: Case, settings: Settings) -> tuple[str, ...]:
    """Return a line for each setting of a case's run that a check with these settings does not use."""
    own = {name: case.settings.get(name) for name in ("accumulate", "remat")}
    others = [f"{name} {own[name]}" for name in own if own[name] not in (None, getattr(settings, name))]
    if case.updates is not None and case.optimizer.scheduler is not None and settings.steps < case.updates:
        others.append(f"the schedule after update {settings.steps} of {case.updates}")
    return (*case.not_exercised, *others)


def validate(case: Case, precision: str, settings: Settings) -> None:
    """Raise `UserError` for the first setting that does not fit the case."""
    from jaxtrain.errors import UserError
    from jaxtrain.passes import remat as rematerialise

    k, rows = settings.accumulate, case.rows
    if precision not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if settings.steps < 1:
        raise UserError(f"steps must be at least 1, got {settings.steps}")
    if case.updates is not None and case.optimizer.scheduler is not None and settings.steps > case.updates:
        raise UserError(f"steps must be at most {case.updates}, those of {case.name}, got {settings.steps}")
    if k < 1 or rows % k:
        divisors = ", ".join(str(k) for k in range(1, rows + 1) if rows % k == 0)
        raise UserError(f"the {rows} rows of {case.name} are not divisible by accumulate {k}: use one of {divisors}")
    rematerialise(lambda: None, settings.remat)  # raises for an unknown policy
