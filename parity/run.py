"""A case checked: both sides run, and the verdict on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parity.case import Case
from parity.compare import Verdict, median, same_meaning, same_precision
from parity.record import Record

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16_params")
REORDERINGS = 3
"""PyTorch's runs over permuted rows: the farthest of them and of the plain one measures a precision's noise."""
TRAININGS = 5
"""Trainings, each from its own weights and data, whose median is a low precision's verdict where the first fails."""


@dataclass(frozen=True)
class Settings:
    """How both sides train: `accumulate` micro-batches to a window, what JAX keeps for the backward pass (`remat`),
    `steps` windows, and the `seed` of weights, data and dropout."""

    accumulate: int = 1
    remat: str = "none"
    steps: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Examination:
    """A verdict and the runs it is on; in fp64 PyTorch's run is the truth."""

    verdict: Verdict
    ours: Record
    theirs: Record
    truth: Record


def check(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Verdict:
    """Train `case` in PyTorch and in JAX, and say whether the two runs are the same.

    In fp64 they are to mean the same; in the others JAX's is to be as near the float64 truth as PyTorch's.
    PyTorch's dropout is given the masks that JAX draws. With `locate`, a case that fails in fp64 is run once more, to
    say which stage is at fault and where the two differ first (`parity.stages`, `parity.locate`). `settings` are those
    of `Settings`. Raises `UserError` for settings that do not fit the case, and where a tensor is left over.
    """
    return examine(case, precision, locate=locate, **settings).verdict


def assert_matches(case: Case, precision: str = "fp64", **settings: Any) -> None:
    """`check`, which raises `AssertionError` with the located report where the two runs are not the same."""
    verdict = check(case, precision, locate=True, **settings)
    if not verdict.passed:
        raise AssertionError("\n".join([f"{case.name} in {precision} is not PyTorch's", *verdict.lines]))


def examine(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Examination:
    """`check`, with the runs that it compared."""
    given = Settings(**settings)
    validate(case, precision, given)
    examination = _training(case, precision, given)
    if examination.verdict.passed:
        return examination
    if precision == "fp64":
        return replace(examination, verdict=_placed(case, examination.verdict, given)) if locate else examination
    # Rounding has discrete consequences: one ReLU's input on the other side of zero, one run a hundred times as far
    # from the truth. A lack of precision is there in every training, such a chance in few.
    others = [_training(case, precision, replace(given, seed=given.seed + i)) for i in range(1, TRAININGS)]
    return _median([examination, *others])


def validate(case: Case, precision: str, settings: Settings) -> None:
    """Raises `UserError` for the first setting that does not fit `case`, or that the two sides would not share."""
    from jaxtrain.errors import UserError
    from jaxtrain.remat import remat as rematerialise
    from parity.attestation import refuse_unlike

    k, rows = settings.accumulate, case.rows
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if settings.steps < 1:
        raise UserError(f"steps {settings.steps} train nothing: make it 1 or more")
    if k < 1 or rows % k:
        divisors = ", ".join(str(k) for k in range(1, rows + 1) if rows % k == 0)
        raise UserError(f"accumulate {k} does not divide the {rows} rows of {case.name}: choose one of {divisors}")
    rematerialise(lambda: None, settings.remat)  # refuses a policy it does not know
    refuse_unlike(precision)


def _training(case: Case, precision: str, settings: Settings) -> Examination:
    # Imported when something is run, so that listing the cases, or a mistyped one, is answered at once.
    from parity import jax_side, torch_side
    from parity.randomness import dropout_masks

    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    masks = dropout_masks(case, precision, accumulate=k, steps=steps, seed=seed)
    torch_run = partial(torch_side.run, case, accumulate=k, steps=steps, seed=seed, masks=masks)
    weights = torch_side.initial_weights(case, seed)
    ours = jax_side.run(case, weights, precision, accumulate=k, remat=settings.remat, steps=steps, seed=seed)
    theirs = torch_run(precision)
    if precision == "fp64":
        return Examination(same_meaning(ours, theirs), ours, theirs, truth=theirs)
    reordered = [torch_run(precision, reorder=i) for i in range(REORDERINGS)]
    truth = torch_run("fp64", skip=theirs.skipped)
    return Examination(same_precision(ours, [theirs, *reordered], truth), ours, theirs, truth)


def _placed(case: Case, verdict: Verdict, settings: Settings) -> Verdict:
    """The verdict with the stage at fault, and the first operation that differs."""
    from parity.locate import locate
    from parity.stages import charge, stages

    # Most differ in the first steps; in all of them the search takes long.
    found = locate(case, seed=settings.seed) or locate(case, seed=settings.seed, steps=settings.steps)
    stage = charge(stages(case, accumulate=settings.accumulate, seed=settings.seed))
    return replace(verdict, first_divergence=found, stage=stage)


def _median(examinations: Sequence[Examination]) -> Examination:
    middle = median([e.verdict for e in examinations])
    return next(e for e in examinations if e.verdict is middle)
