"""A case checked: both sides run, and the verdict on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.case import Case
from parity.compare import Verdict, median, same_meaning, same_precision
from parity.coverage import Coverage, at_kinks, kinks
from parity.record import Record, Tensors
from parity.trajectory import JUDGED, RUNS

if TYPE_CHECKING:
    from parity.randomness import Masks

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16_params")
REORDERINGS = 3
"""PyTorch's runs over permuted rows: the farthest of them and of the plain one measures a precision's noise.

Where rows cannot be permuted (there is one, or they are folded into others before a dropout) it is as many runs from
weights one ulp off. Those are not beside the others everywhere: one ulp of float32 is an error of its own, of the
inputs, by which the noise of the MLP's parameters would be twice as large, and bugs half as plain.
"""
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
    """What PyTorch did: the weights it started with, its run, the runs over permuted rows, those from weights one ulp
    off, and the float64 truth."""

    weights: Tensors
    theirs: Record
    reordered: Sequence[Record]
    one_ulp: Sequence[Record]
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
    PyTorch's dropout is given the masks that JAX draws. With `locate`, a case that fails is run once more, to say which
    stage is at fault and where the two differ first (`parity.stages`, `parity.locate`), or why that cannot be said; and
    one whose bound clips always or never in fp64 is trained under another, too. `settings` are those of `Settings`.
    Raises `UserError` for settings that do not fit the case, and where a tensor is left over.
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
    case = _with_tables(case)
    reference = partial(live_reference, case, precision)
    if precision != "fp64":
        examination = _repeated(case, precision, given, reference)
        if locate and not examination.verdict.passed:
            return replace(examination, verdict=_placed_low(case, precision, examination.verdict, given))
        return examination
    examination = _training(case, precision, given, reference(given, coverage))
    from parity.conditions import unmet

    examination = replace(examination, unseen=(*coverage.unseen(case), *unmet(case, given.seed)))
    return _followed_up(case, examination, given, coverage) if locate else examination


def replay(case: Case, precision: str, reference: Callable[[Settings], Reference], **settings: Any) -> Examination:
    """`examine` beside what PyTorch did elsewhere (`parity.bundle`), without PyTorch."""
    given = Settings(**settings)
    validate(case, precision, given)
    case = _with_tables(case)
    if precision != "fp64":
        return _repeated(case, precision, given, reference)
    return _training(case, precision, given, reference(given))


def _with_tables(case: Case) -> Case:
    """The case with the tables that it leaves out. They are proposed with PyTorch, which a replay may do without."""
    if case.has_tables:
        return case
    from parity.weights import with_tables

    return with_tables(case)


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
    from jaxtrain.transforms import remat as rematerialise

    k, rows = settings.accumulate, case.rows
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if settings.steps < 1:
        raise UserError(f"steps {settings.steps} train nothing: make it 1 or more")
    if k < 1 or rows % k:
        divisors = ", ".join(str(k) for k in range(1, rows + 1) if rows % k == 0)
        raise UserError(f"accumulate {k} does not divide the {rows} rows of {case.name}: choose one of {divisors}")
    rematerialise(lambda: None, settings.remat)  # refuses a policy it does not know


def live_reference(
    case: Case, precision: str, settings: Settings, coverage: Coverage | None = None, judged: int = JUDGED
) -> Reference:
    """PyTorch, run; from weights one ulp off too where there are more than `judged` steps."""
    # Imported when something is run, so that listing the cases, or a mistyped one, is answered at once.
    from parity import torch_side
    from parity.attestation import refuse_unlike
    from parity.randomness import dropout_masks

    refuse_unlike(precision)
    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    masks = dropout_masks(case, precision, accumulate=k, steps=steps, seed=seed)
    torch_run = partial(torch_side.run, case, accumulate=k, steps=steps, seed=seed, masks=masks)
    weights, long = torch_side.initial_weights(case, seed), steps > judged
    if precision == "fp64":
        theirs = torch_run(precision, watch=coverage)
        one_ulp = [torch_run(precision, one_ulp=i) for i in range(RUNS if long else 0)]
        return Reference(weights, theirs, [], one_ulp, truth=theirs)
    theirs = torch_run(precision)
    permuted = REORDERINGS if _permutable(masks[0], case.rows // k) else 0
    reordered = [torch_run(precision, reorder=i) for i in range(permuted)]
    one_ulp = [torch_run(precision, one_ulp=i) for i in range(int(long) if permuted else REORDERINGS)]
    return Reference(weights, theirs, reordered, one_ulp, truth=torch_run("fp64", skip=theirs.skipped))


def _permutable(masks: "Masks", rows: int) -> bool:
    """Whether a micro-batch of so many rows, dropped by these masks, comes in another order too."""
    from jaxtrain.errors import UserError
    from parity.randomness import reordered

    try:
        reordered(masks, np.arange(rows))
    except UserError:
        return False
    return rows > 1


def _training(case: Case, precision: str, settings: Settings, reference: Reference) -> Examination:
    from parity import jax_side

    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    ours = jax_side.run(case, reference.weights, precision, accumulate=k, remat=settings.remat, steps=steps, seed=seed)
    theirs, one_ulp, truth = reference.theirs, reference.one_ulp, reference.truth
    if precision == "fp64":
        return Examination(same_meaning(ours, theirs, one_ulp), ours, theirs, truth)
    noise = reference.reordered or one_ulp
    return Examination(same_precision(ours, [theirs, *noise], truth, one_ulp), ours, theirs, truth)


def _followed_up(case: Case, examination: Examination, settings: Settings, coverage: Coverage) -> Examination:
    """What fails, placed; what holds, but was never or always clipped, tried with a bound between, and on what its
    batches never met."""
    if not examination.verdict.passed:
        return replace(examination, verdict=_placed(case, examination, settings))
    examination = replace(examination, unseen=(*examination.unseen, *_tried(case, settings)))
    sometimes = coverage.clipping_sometimes(case)
    if sometimes is None:
        return examination
    second = _training(sometimes, "fp64", settings, live_reference(sometimes, "fp64", settings))
    said = f"clip_norm {sometimes.clip_norm:.2g}"
    if second.verdict.passed:
        return replace(examination, unseen=(*examination.unseen, f"clipping holds with {said}, tried for that reason"))
    verdict = _placed(sometimes, second, settings)
    return replace(second, verdict=replace(verdict, faults=tuple(f"{said}: {line}" for line in verdict.faults)))


def _tried(case: Case, settings: Settings) -> Iterator[str]:
    """Whether the case holds on what its batches never met. That it does not is no fault: it may never meet it."""
    from parity.conditions import meeting

    for how, changed in meeting(case, settings.seed):
        verdict = check(changed, steps=2, seed=settings.seed)
        yield f"{how}, tried for that reason: {'holds' if verdict.passed else f'differs, {verdict.faults[0]}'}"


def _placed(case: Case, examination: Examination, settings: Settings) -> Verdict:
    """The verdict with the stage at fault, the first operation that differs, and the convention that explains it."""
    from parity.diagnose import diagnose
    from parity.locate import locate
    from parity.stages import charge, stages

    # Most differ in the first steps. In later ones the search takes long, and would find chaos too.
    found = locate(case, seed=settings.seed)
    chaos = None if found else _chaos(case, examination, settings)
    if not (found or chaos):
        found = locate(case, seed=settings.seed, steps=min(settings.steps, JUDGED))
    stagewise = stages(case, accumulate=settings.accumulate, seed=settings.seed)
    diagnosis = diagnose(case, found, stagewise, accumulate=settings.accumulate, seed=settings.seed)
    stage, said = charge(stagewise), [] if diagnosis is None else [str(diagnosis)]
    failing = next((s for s in stagewise if not s.holds), None)
    if failing is not None and failing.name == "gradients":
        met = at_kinks(case, failing.step, accumulate=settings.accumulate, seed=settings.seed)
        if diagnosis is not None:
            met = {name: times for name, times in met.items() if name == diagnosis.subject}
        said += [kinks(met)] if met else []
        if met and diagnosis is None:
            said += ["PyTorch's slopes are those of jaxtrain.losses.subgradients"]
    unlocated = None if found else chaos or _arises(case, "fp64", settings)
    if not (found or unlocated or stage) and settings.steps > JUDGED:
        unlocated = f"no operation differs in {JUDGED} steps: the difference arises later"
    return replace(
        examination.verdict, first_divergence=found, stage=stage, diagnosis="; ".join(said) or None, unlocated=unlocated
    )


def _chaos(case: Case, examination: Examination, settings: Settings) -> str | None:
    """What the bars refuse although it is no more than one ulp of the weights makes, in a line."""
    one_ulp = live_reference(case, "fp64", settings, judged=1).one_ulp
    if not one_ulp or not same_meaning(examination.ours, examination.theirs, one_ulp, judged=1).passed:
        return None
    return (
        "chaos: no more than one ulp of PyTorch's weights makes; fewer steps, or a smaller learning rate, can be judged"
    )


def _arises(case: Case, precision: str, settings: Settings) -> str | None:
    """The setting without which the runs agree."""
    for name, plain in {
        "remat": replace(settings, remat="none"),
        "accumulate": replace(settings, accumulate=1),
    }.items():
        if plain != settings and check(case, precision, **asdict(plain)).passed:
            asked, instead = getattr(settings, name), getattr(plain, name)
            return f"agrees with {name} {instead}: the difference arises with {name} {asked} alone"
    return None


def _placed_low(case: Case, precision: str, verdict: Verdict, settings: Settings) -> Verdict:
    """The verdict with where float64 differs too; else the first module that is less precise than PyTorch's."""
    from parity.activations import activations, first_imprecise

    exact = check(case, locate=True, **asdict(settings))
    if not exact.passed:
        return replace(
            verdict,
            first_divergence=exact.first_divergence,
            stage=f"in fp64 too: {exact.stage or exact.faults[0]}",
            diagnosis=exact.diagnosis,
            unlocated=exact.unlocated,
        )
    found = first_imprecise(activations(case, precision, accumulate=settings.accumulate, seed=settings.seed))
    if found is not None:
        return replace(verdict, first_divergence=found)
    arises = _arises(case, precision, settings) or "no module's first output is less precise"
    return replace(verdict, unlocated=f"agrees in fp64, differs in {precision}: {arises}")


def _median(examinations: Sequence[Examination]) -> Examination:
    middle = median([e.verdict for e in examinations])
    return next(e for e in examinations if e.verdict is middle)
