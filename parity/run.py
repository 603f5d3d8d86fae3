"""A case checked: both sides run, and the verdict on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parity.case import Case
from parity.compare import Verdict, median, same_meaning, same_precision
from parity.coverage import Coverage
from parity.record import Record, Tensors

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
class Reference:
    """What PyTorch did: the weights it started with, its run, the runs over permuted rows, and the float64 truth."""

    weights: Tensors
    theirs: Record
    reordered: Sequence[Record]
    truth: Record


@dataclass(frozen=True)
class Examination:
    """A verdict and the runs it is on; in fp64 PyTorch's run is the truth. `unseen`: a line for each thing that the
    runs did not exercise, so that nothing is proven of it; said of fp64 only."""

    verdict: Verdict
    ours: Record
    theirs: Record
    truth: Record
    unseen: tuple[str, ...] = ()


def check(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Verdict:
    """Train `case` in PyTorch and in JAX, and say whether the two runs are the same.

    In fp64 they are to mean the same; in the others JAX's is to be as near the float64 truth as PyTorch's.
    PyTorch's dropout is given the masks that JAX draws. With `locate`, a case that fails in fp64 is run once more, to
    say which stage is at fault and where the two differ first (`parity.stages`, `parity.locate`), and one whose bound
    clips always or never is trained under another, too. `settings` are those of `Settings`. Raises `UserError` for
    settings that do not fit the case, and where a tensor is left over.
    """
    return examine(case, precision, locate=locate, **settings).verdict


def assert_matches(case: Case, precision: str = "fp64", **settings: Any) -> None:
    """`check`, which raises `AssertionError` with the located report where the two runs are not the same."""
    verdict = check(case, precision, locate=True, **settings)
    if not verdict.passed:
        raise AssertionError("\n".join([f"{case.name} in {precision} is not PyTorch's", *verdict.lines]))


def examine(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Examination:
    """`check`, with the runs that it compared."""
    given, coverage = Settings(**settings), Coverage()
    validate(case, precision, given)
    reference = partial(live_reference, case, precision)
    if precision != "fp64":
        return _repeated(case, precision, given, reference)
    examination = _training(case, precision, given, reference(given, coverage))
    examination = replace(examination, unseen=coverage.unseen(case))
    return _followed_up(case, examination, given, coverage) if locate else examination


def replay(case: Case, precision: str, reference: Callable[[Settings], Reference], **settings: Any) -> Examination:
    """`examine` beside what PyTorch did elsewhere (`parity.bundle`), without PyTorch."""
    given = Settings(**settings)
    validate(case, precision, given)
    if precision != "fp64":
        return _repeated(case, precision, given, reference)
    return _training(case, precision, given, reference(given))


def _repeated(
    case: Case, precision: str, settings: Settings, reference: Callable[[Settings], Reference]
) -> Examination:
    """A low precision's examination: where the first training fails, the median of several."""

    def training(i: int) -> Examination:
        own = replace(settings, seed=settings.seed + i)
        return _training(case, precision, own, reference(own))

    examination = training(0)
    if examination.verdict.passed:
        return examination
    # Rounding has discrete consequences: one ReLU's input on the other side of zero, one run a hundred times as far
    # from the truth. A lack of precision is there in every training, such a chance in few.
    return _median([examination, *map(training, range(1, TRAININGS))])


def validate(case: Case, precision: str, settings: Settings) -> None:
    """Raises `UserError` for the first setting that does not fit `case`."""
    from jaxtrain.errors import UserError
    from jaxtrain.remat import remat as rematerialise

    k, rows = settings.accumulate, case.rows
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if settings.steps < 1:
        raise UserError(f"steps {settings.steps} train nothing: make it 1 or more")
    if k < 1 or rows % k:
        divisors = ", ".join(str(k) for k in range(1, rows + 1) if rows % k == 0)
        raise UserError(f"accumulate {k} does not divide the {rows} rows of {case.name}: choose one of {divisors}")
    rematerialise(lambda: None, settings.remat)  # refuses a policy it does not know


def live_reference(case: Case, precision: str, settings: Settings, coverage: Coverage | None = None) -> Reference:
    """PyTorch, run."""
    # Imported when something is run, so that listing the cases, or a mistyped one, is answered at once.
    from parity import torch_side
    from parity.attestation import refuse_unlike
    from parity.randomness import dropout_masks

    refuse_unlike(precision)
    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    masks = dropout_masks(case, precision, accumulate=k, steps=steps, seed=seed)
    torch_run = partial(torch_side.run, case, accumulate=k, steps=steps, seed=seed, masks=masks)
    weights = torch_side.initial_weights(case, seed)
    if precision == "fp64":
        theirs = torch_run(precision, watch=coverage)
        return Reference(weights, theirs, [], truth=theirs)
    theirs = torch_run(precision)
    reordered = [torch_run(precision, reorder=i) for i in range(REORDERINGS)]
    return Reference(weights, theirs, reordered, truth=torch_run("fp64", skip=theirs.skipped))


def _training(case: Case, precision: str, settings: Settings, reference: Reference) -> Examination:
    from parity import jax_side

    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    ours = jax_side.run(case, reference.weights, precision, accumulate=k, remat=settings.remat, steps=steps, seed=seed)
    theirs, truth = reference.theirs, reference.truth
    if precision == "fp64":
        return Examination(same_meaning(ours, theirs), ours, theirs, truth)
    return Examination(same_precision(ours, [theirs, *reference.reordered], truth), ours, theirs, truth)


def _followed_up(case: Case, examination: Examination, settings: Settings, coverage: Coverage) -> Examination:
    """What fails, placed; what holds, but was never or always clipped, tried with a bound between."""
    if not examination.verdict.passed:
        return replace(examination, verdict=_placed(case, examination.verdict, settings))
    sometimes = coverage.clipping_sometimes(case)
    if sometimes is None:
        return examination
    second = _training(sometimes, "fp64", settings, live_reference(sometimes, "fp64", settings))
    said = f"clip_norm {sometimes.clip_norm:.2g}"
    if second.verdict.passed:
        return replace(examination, unseen=(*examination.unseen, f"clipping holds with {said}, tried for that reason"))
    verdict = _placed(sometimes, second.verdict, settings)
    return replace(second, verdict=replace(verdict, faults=tuple(f"{said}: {line}" for line in verdict.faults)))


def _placed(case: Case, verdict: Verdict, settings: Settings) -> Verdict:
    """The verdict with the stage at fault, the first operation that differs, and the convention that explains it."""
    from parity.diagnose import diagnose
    from parity.locate import locate
    from parity.stages import charge, stages

    # Most differ in the first steps; in all of them the search takes long.
    found = locate(case, seed=settings.seed) or locate(case, seed=settings.seed, steps=settings.steps)
    stagewise = stages(case, accumulate=settings.accumulate, seed=settings.seed)
    diagnosis = diagnose(case, found, stagewise, accumulate=settings.accumulate, seed=settings.seed)
    said = None if diagnosis is None else str(diagnosis)
    return replace(verdict, first_divergence=found, stage=charge(stagewise), diagnosis=said)


def _median(examinations: Sequence[Examination]) -> Examination:
    middle = median([e.verdict for e in examinations])
    return next(e for e in examinations if e.verdict is middle)
