"""Check a case: run both sides, compare them, and explain a difference."""

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

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16_compute", "bf16_params")
ROUNDING = 1e-5
"""Largest relative difference that the rounding of constants to float32 may explain."""
LISTED = 3
"""Number of names that a line lists."""
REORDERINGS = 3
"""Number of PyTorch's runs over permuted rows. The farthest of them and the plain run measure a precision's noise.

Where rows cannot be permuted (a single row, or rows that are folded into others before a dropout), runs from weights
one ulp off take their place. They are not used everywhere: one ulp of float32 is an additional error of the inputs,
which doubles the noise of the MLP's parameters and would hide smaller bugs.
"""
TRAININGS = 5
"""Where the first training in a low precision fails, the verdict is the median of this many, each from another seed."""


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


@dataclass(frozen=True)
class Reference:
    """PyTorch's side of a check.

    Attributes:
      weights: Initial weights and buffers.
      theirs: The plain run.
      reordered: Runs over permuted rows.
      one_ulp: Runs from weights one ulp off.
      truth: The float64 run.
    """

    weights: Tensors
    theirs: Record
    reordered: Sequence[Record]
    one_ulp: Sequence[Record]
    truth: Record


@dataclass(frozen=True)
class Examination:
    """A verdict with its runs.

    Attributes:
      verdict: The verdict.
      ours: JAX's run.
      theirs: PyTorch's run.
      truth: The float64 run; in fp64 the same as `theirs`.
      notes: Lines on what the verdict rests on: proposed names that are not proved, constants that are rounded.
      not_exercised: A line for each behavior that the runs did not exercise and therefore do not prove; in fp64 only.
    """

    verdict: Verdict
    ours: Record
    theirs: Record
    truth: Record
    notes: tuple[str, ...] = ()
    not_exercised: tuple[str, ...] = ()


def check(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Verdict:
    """Train a case in PyTorch and in JAX and compare the two runs.

    In fp64 every value must be equal to the bars of `parity.bars`; in other precisions JAX must be as close to the
    float64 truth as PyTorch is. PyTorch's dropout uses the masks that JAX draws.

    Args:
      case: The case.
      precision: "fp64", "fp32", "bf16", "fp16", "bf16_compute" or "bf16_params".
      locate: Whether to explain a difference: the stage at fault, the first operation that differs, the convention that
        explains it. In fp64, a case whose gradient is always or never clipped is trained with another bound as well.
      **settings: Fields of `Settings`.

    Returns:
      The verdict.

    Raises:
      UserError: A setting does not fit the case, or a tensor has no counterpart.

    Example:
      >>> from parity.cases import CASES
      >>> check(CASES["autograd.cubic"](), steps=2).passed
      True
    """
    return examine(case, precision, locate=locate, **settings).verdict


def assert_matches(case: Case, precision: str = "fp64", **settings: Any) -> None:
    """Run `check` with `locate` and raise if the case does not hold.

    Args:
      case: The case.
      precision: As in `check`.
      **settings: Fields of `Settings`.

    Raises:
      AssertionError: The runs differ; the message lists the faults and where they are.
      UserError: As in `check`.
    """
    examination = examine(case, precision, locate=True, **settings)
    if not examination.verdict.passed:
        lines = [*examination.verdict.lines, *examination.notes]
        raise AssertionError("\n".join([f"{case.name} in {precision} differs from PyTorch", *lines]))


def examine(case: Case, precision: str = "fp64", *, locate: bool = False, **settings: Any) -> Examination:
    """Run `check` and return its runs as well."""
    given = Settings(**settings)
    validate(case, precision, given)
    case, notes = _named(case)
    examination = (_examine_meaning if precision == "fp64" else _examine_precision)(case, precision, locate, given)
    return replace(examination, notes=(*notes, *examination.notes))


def _examine_precision(case: Case, precision: str, locate: bool, settings: Settings) -> Examination:
    examination = _repeated(case, precision, settings, partial(live_reference, case, precision))
    if locate and not examination.verdict.passed:
        return replace(examination, verdict=_placed_low(case, precision, examination.verdict, settings))
    return examination


def _examine_meaning(case: Case, precision: str, locate: bool, settings: Settings) -> Examination:
    from parity.conditions import unmet_conditions

    coverage = Coverage()
    candidates, examination = _compared(case, settings, coverage)
    examination = replace(
        examination, not_exercised=(*coverage.not_exercised(case), *unmet_conditions(case, settings.seed))
    )
    if not locate:
        return examination
    if examination.verdict.passed:
        return _tried_further(case, examination, settings, coverage)
    return replace(examination, verdict=_placed(candidates, examination, settings))


def _compared(case: Case, settings: Settings, coverage: Coverage | None = None) -> tuple[list[Case], Examination]:
    """Compare a case in float64.

    Returns:
      A tuple (versions of the case that mean the same, to locate a difference in; examination).
    """
    examination = _training(case, "fp64", settings, live_reference(case, "fp64", settings, coverage))
    return ([case], examination) if examination.verdict.passed else _with_other_constants(case, examination, settings)


def _with_other_constants(case: Case, examination: Examination, settings: Settings) -> tuple[list[Case], Examination]:
    """Compare a case that differs again, with constants that mean the same.

    PyTorch rounds a constant that it computes when the model is built to float32, and JAX one that NumPy computes.
    """
    from parity.torch_side import with_exact_constants

    exact, names = with_exact_constants(case)
    examinations = [(case, examination)]
    notes: tuple[str, ...] = ()
    if names:
        # JAX's run is the same: it computes its own constants.
        second = _judged(examination.ours, live_reference(exact, "fp64", settings))
        notes = (f"{_listed(names)} rounded to float32 in PyTorch; compared in float64",)
        examinations.append((exact, second))
        if second.verdict.passed:
            return [case, exact], replace(second, notes=notes)
    close = [(compared, e) for compared, e in examinations[::-1] if _rel_max(e.verdict) <= ROUNDING]
    nudged = _nudged_runs(case, examination.ours, settings) if close else []
    for compared, failed in close if nudged else []:
        verdict = same_meaning(failed.ours, failed.theirs, judged=settings.steps, nudged=nudged)
        if verdict.passed:
            line = f"JAX's constants rounded to float32 explain the difference, {verdict.grad_rel_max:.1e}"
            notes = (*(notes if compared is exact else ()), line)
            return [compared], replace(failed, verdict=verdict, notes=notes)
    return [compared for compared, _ in examinations], examination


def _rel_max(verdict: Verdict) -> float:
    return max(verdict.loss_rel, verdict.grad_rel_max)


def _nudged_runs(case: Case, ours: Record, settings: Settings) -> list[Record]:
    """JAX's runs with its float32 constants changed within their rounding; none if it has no such constants."""
    from parity import jax_side, torch_side

    weights, k, remat = torch_side.initial_weights(case, settings.seed), settings.accumulate, settings.remat
    run = partial(jax_side.run, case, weights, "fp64", accumulate=k, remat=remat, steps=settings.steps)
    first = run(seed=settings.seed, nudge=0)
    if all(np.array_equal(x, ours.grads[name]) for name, x in first.grads.items()):
        return []
    return [first, *(run(seed=settings.seed, nudge=i) for i in range(1, REORDERINGS))]


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many follow."""
    more = f" and {len(names) - LISTED} more are" if len(names) > LISTED else " is" if len(names) == 1 else " are"
    return ", ".join(names[:LISTED]) + more


def replay(case: Case, precision: str, reference: Callable[[Settings], Reference], **settings: Any) -> Examination:
    """Compare JAX with a recorded run of PyTorch (`parity.bundle`); PyTorch need not be installed."""
    given = Settings(**settings)
    validate(case, precision, given)
    case, _ = _named(case)
    if precision != "fp64":
        return _repeated(case, precision, given, reference)
    return _training(case, precision, given, reference(given))


def _named(case: Case) -> tuple[Case, tuple[str, ...]]:
    """The case with the tables that it leaves out, and notes on them. They are proposed with PyTorch, which a replay
    may do without."""
    if case.has_tables:
        return case, ()
    from parity.weights import proposal_of

    proposal = proposal_of(case)
    return replace(case, names=proposal.names, buffers=proposal.buffers), proposal.notes


def _repeated(
    case: Case, precision: str, settings: Settings, reference: Callable[[Settings], Reference]
) -> Examination:
    """The examination in a low precision: the first training's if it holds, else the median of several."""

    def training(i: int) -> Examination:
        own = replace(settings, seed=settings.seed + i)
        return _training(case, precision, own, reference(own))

    examination = training(0)
    if examination.verdict.passed:
        return examination
    # Rounding has discrete consequences: with one ReLU input on the other side of zero, a run may be a hundred times
    # farther from the truth. A lack of precision shows in every training, such a coincidence in few.
    return _median([examination, *map(training, range(1, TRAININGS))])


def validate(case: Case, precision: str, settings: Settings) -> None:
    """Raise `UserError` for the first setting that does not fit the case."""
    from jaxtrain.errors import UserError
    from jaxtrain.transforms import remat as rematerialise

    k, rows = settings.accumulate, case.rows
    if precision not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if settings.steps < 1:
        raise UserError(f"steps must be at least 1, got {settings.steps}")
    if k < 1 or rows % k:
        divisors = ", ".join(str(k) for k in range(1, rows + 1) if rows % k == 0)
        raise UserError(f"the {rows} rows of {case.name} are not divisible by accumulate {k}: use one of {divisors}")
    rematerialise(lambda: None, settings.remat)  # raises for an unknown policy


def live_reference(
    case: Case, precision: str, settings: Settings, coverage: Coverage | None = None, judged: int = JUDGED
) -> Reference:
    """Run PyTorch's side; also from weights one ulp off if there are more than `judged` steps."""
    # Imported here, so that listing the cases or reporting a mistyped one is fast.
    from parity import torch_side
    from parity.attestation import check_matmul_precision
    from parity.randomness import dropout_masks
    from parity.torch_side import Variant

    check_matmul_precision(precision)
    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    masks = dropout_masks(case, precision, accumulate=k, steps=steps, seed=seed)
    torch_run = partial(torch_side.run, case, accumulate=k, steps=steps, seed=seed, masks=masks)
    weights, long = torch_side.initial_weights(case, seed), steps > judged
    if precision == "fp64":
        theirs = torch_run(precision, watch=coverage)
        one_ulp = [torch_run(precision, variant=Variant(one_ulp=i)) for i in range(RUNS if long else 0)]
        return Reference(weights, theirs, [], one_ulp, truth=theirs)
    theirs = torch_run(precision)
    permuted = REORDERINGS if _permutable(masks[0], case.rows // k) else 0
    reordered = [torch_run(precision, variant=Variant(reorder=i)) for i in range(permuted)]
    one_ulp = [torch_run(precision, variant=Variant(one_ulp=i)) for i in range(int(long) if permuted else REORDERINGS)]
    return Reference(weights, theirs, reordered, one_ulp, truth=torch_run("fp64", variant=Variant(skip=theirs.skipped)))


def _permutable(masks: "Masks", rows: int) -> bool:
    """Whether the rows of a micro-batch with these dropout masks can be permuted."""
    from jaxtrain.errors import UserError
    from parity.randomness import permute_masks

    try:
        permute_masks(masks, np.arange(rows))
    except UserError:
        return False
    return rows > 1


def _training(case: Case, precision: str, settings: Settings, reference: Reference) -> Examination:
    from parity import jax_side

    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    ours = jax_side.run(case, reference.weights, precision, accumulate=k, remat=settings.remat, steps=steps, seed=seed)
    if precision == "fp64":
        return _judged(ours, reference)
    theirs, one_ulp, truth = reference.theirs, reference.one_ulp, reference.truth
    noise = reference.reordered or one_ulp
    return Examination(same_precision(ours, [theirs, *noise], truth, one_ulp), ours, theirs, truth)


def _judged(ours: Record, reference: Reference) -> Examination:
    """Compare two float64 runs."""
    theirs = reference.theirs
    return Examination(same_meaning(ours, theirs, reference.one_ulp), ours, theirs, reference.truth)


def _tried_further(case: Case, examination: Examination, settings: Settings, coverage: Coverage) -> Examination:
    """Try a case that holds on what its batches never met, and with another bound if its gradient was never or always
    clipped."""
    examination = replace(examination, not_exercised=(*examination.not_exercised, *_tried(case, settings)))
    sometimes = coverage.clipping_sometimes(case)
    if sometimes is None:
        return examination
    candidates, second = _compared(sometimes, settings)
    bound = f"clip_norm {sometimes.clip_norm:.2g}"
    if second.verdict.passed:
        return replace(
            examination, not_exercised=(*examination.not_exercised, f"clipping holds with {bound}, checked in addition")
        )
    verdict = _placed(candidates, second, settings)
    return replace(second, verdict=replace(verdict, faults=tuple(f"{bound}: {line}" for line in verdict.faults)))


def _tried(case: Case, settings: Settings) -> Iterator[str]:
    """Whether the case holds on what its batches never met; a difference is reported but is no fault."""
    from parity.conditions import cases_that_meet

    for how, changed in cases_that_meet(case, settings.seed):
        verdict = check(changed, steps=2, seed=settings.seed)
        yield f"{how}, checked in addition: {'holds' if verdict.passed else f'differs, {verdict.faults[0]}'}"


def _placed(candidates: Sequence[Case], examination: Examination, settings: Settings) -> Verdict:
    """Add the stage at fault, the first operation that differs and the convention that explains it.

    Of several `candidates`, versions of a case that mean the same, the one that agrees with JAX for longer is compared.
    """
    from parity.diagnose import diagnose
    from parity.locate import locate
    from parity.stages import at_fault, charge, run_stages

    # Most cases differ in the first steps. In later ones the search takes long and would also find chaos.
    located = [(locate(case, seed=settings.seed), case) for case in candidates]
    found, case = max(located, key=lambda at: (0, 0) if at[0] is None else (at[0].step, at[0].position))
    chaos = None if found else _chaos(case, examination, settings)
    if not (found or chaos):
        found = locate(case, seed=settings.seed, steps=min(settings.steps, JUDGED))
    stagewise = run_stages(case, accumulate=settings.accumulate, seed=settings.seed)
    diagnosis, stages = diagnose(stagewise, found), stagewise.stages
    stage, explanation = (
        charge(stages, None if found is None else found.stage),
        [] if diagnosis is None else [str(diagnosis)],
    )
    failing = at_fault(stages)
    if failing is not None and failing.name == "gradients":
        met = at_kinks(case, failing.step, accumulate=settings.accumulate, seed=settings.seed)
        if diagnosis is not None:
            met = {name: times for name, times in met.items() if name == diagnosis.subject}
        explanation += [kinks(met)] if met else []
        if met and diagnosis is None:
            explanation += ["jaxtrain.losses.subgradients has PyTorch's slopes"]
    unlocated = None if found else chaos or _arises(case, "fp64", settings)
    if not (found or unlocated or stage) and settings.steps > JUDGED:
        unlocated = f"no operation differs in {JUDGED} steps: the difference arises later"
    return replace(
        examination.verdict,
        first_divergence=found,
        stage=stage,
        diagnosis="; ".join(explanation) or None,
        unlocated=unlocated,
    )


def _chaos(case: Case, examination: Examination, settings: Settings) -> str | None:
    """A line if the difference is no larger than what one ulp of the weights causes."""
    one_ulp = live_reference(case, "fp64", settings, judged=1).one_ulp
    if not one_ulp or not same_meaning(examination.ours, examination.theirs, one_ulp, judged=1).passed:
        return None
    return (
        "chaos: the difference is no larger than that of one ulp of PyTorch's weights: "
        "use fewer steps or a smaller learning rate"
    )


def _arises(case: Case, precision: str, settings: Settings) -> str | None:
    """A line for the setting without which the runs agree."""
    for name, plain in {
        "remat": replace(settings, remat="none"),
        "accumulate": replace(settings, accumulate=1),
    }.items():
        if plain != settings and check(case, precision, **asdict(plain)).passed:
            asked, instead = getattr(settings, name), getattr(plain, name)
            return f"agrees with {name} {instead}: the difference arises only with {name} {asked}"
    return None


def _placed_low(case: Case, precision: str, verdict: Verdict, settings: Settings) -> Verdict:
    """Add where float64 differs as well, or else the first module that is less precise than PyTorch's."""
    from parity.activations import activations, first_imprecise

    exact = check(case, locate=True, **asdict(settings))
    if not exact.passed:
        return replace(
            verdict,
            first_divergence=exact.first_divergence,
            stage=f"in fp64 as well: {exact.stage or exact.faults[0]}",
            diagnosis=exact.diagnosis,
            unlocated=exact.unlocated,
        )
    found = first_imprecise(activations(case, precision, accumulate=settings.accumulate, seed=settings.seed))
    if found is not None:
        return replace(verdict, first_divergence=found)
    arises = _arises(case, precision, settings) or "every module's first output is as precise as PyTorch's"
    return replace(verdict, unlocated=f"agrees in fp64, differs in {precision}: {arises}")


def _median(examinations: Sequence[Examination]) -> Examination:
    middle = median([e.verdict for e in examinations])
    return next(e for e in examinations if e.verdict is middle)
