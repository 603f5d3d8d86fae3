"""Check a case: run both sides, compare them, and explain a difference."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import user_facing
from parity.case import Case
from parity.compare.examination import Examination, program_of, train
from parity.compare.float64 import compare
from parity.compare.low_precision import repeated
from parity.compare.reference import Reference, live_reference
from parity.compare.verdict import Verdict
from parity.explain.difference import arises, explain
from parity.progress import Listener, report, reported_to
from parity.settings import EXACT, FP8, Settings, in_double, left_out, settings_of, validate
from parity.unexercised.coverage import Coverage

if TYPE_CHECKING:
    from parity.sides.jax_side import Program


@user_facing
def check(
    case: Case, precision: str = "fp64", *, locate: bool = False, progress: Listener | None = None, **settings: Any
) -> Verdict:
    """Train a case in PyTorch and in JAX and compare the two runs.

    In fp64 every value must be equal to the bars of `parity.bars`; in other precisions JAX must be as close to the
    float64 truth as PyTorch is. PyTorch's dropout uses the masks that JAX draws. In fp64 a case that differs in the
    first step is not trained further.

    Args:
      case: The case.
      precision: "fp64", "fp32", "bf16", "fp16", "bf16_compute", "bf16_params", "bf16_params_stochastic",
        "bf16_params_kahan", "fp8", "fp8_delayed", "fp8_row" or "fp8_block"; or "fp64_fp8" and so on, which asks in
        float64 whether both sides quantize alike (`parity.settings.EXACT`).
      locate: Whether to explain a difference: the stage at fault, the first operation that differs, the convention that
        explains it. In fp64, a case whose gradient is always or never clipped is trained with another bound as well,
        and selections of which only one side was taken are listed.
      progress: Called with a line for each stage of the check and each update, for example `print`.
      **settings: Fields of `Settings`; those of the case by default (`Case.settings`).

    Returns:
      The verdict.

    Raises:
      UserError: A setting does not fit the case, or a tensor has no counterpart.

    Example:
      >>> from parity.cases import CASES
      >>> check(CASES["autograd.cubic"](), steps=2).passed
      True
    """
    with reported_to(progress):
        return examine(case, precision, locate=locate, **settings).verdict


@user_facing
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
    from parity.weights import completed

    given = settings_of(case, **settings)
    validate(case, precision, given)
    report(f"{precision}: matching weights")
    case, notes = completed(case)
    examination = _EXAMINE.get(precision, _examine_low_precision)(case, precision, locate, given)
    unused = left_out(case, given)
    return replace(
        examination,
        notes=(*notes, *examination.notes),
        not_exercised=(*unused, *examination.not_exercised),
    )


def replay(case: Case, precision: str, reference: Callable[[Settings], Reference], **settings: Any) -> Examination:
    """Compare JAX with a recorded run of PyTorch (`parity.bundle`); PyTorch need not be installed."""
    given = settings_of(case, **settings)
    validate(case, precision, given)
    if not case.has_tables:
        from parity.weights import with_tables  # proposes them with PyTorch, which a replay may do without

        case = with_tables(case)
    program = program_of(case, precision, given)
    examination = (
        train(case, program, given, reference(given))
        if in_double(precision)
        else repeated(case, program, given, reference)
    )
    return replace(examination, not_exercised=left_out(case, given))


def _examine_float64(case: Case, precision: str, locate: bool, settings: Settings) -> Examination:
    from parity.unexercised.conditions import unmet_conditions
    from parity.unexercised.one_sided import one_sided_selections

    coverage, program = Coverage(), program_of(case, precision, settings)
    candidates, examination = compare(case, program, settings, coverage)
    examination = _with_outputs(candidates[-1], examination)
    observed = coverage.not_exercised(case) if coverage.norms else ("the first step differs: no other was compared",)
    not_exercised = (*examination.not_exercised, *observed, *unmet_conditions(case, settings.seed))
    examination = replace(examination, not_exercised=not_exercised)
    if not locate or examination.verdict.unlocated:
        return examination
    if examination.verdict.passed:
        report("fp64: holds; watching selections")
        selections = one_sided_selections(case, settings.seed)
        examination = replace(examination, not_exercised=(*examination.not_exercised, *selections))
        return _tried_further(candidates[-1], program, examination, settings, coverage)
    return replace(examination, verdict=explain(candidates, examination, settings))


def _with_outputs(case: Case, examination: Examination) -> Examination:
    """Compare the outputs of an imported module that trains alike, in evaluation."""
    if case.outputs is None or not examination.verdict.passed:
        return examination
    from parity.compare.outputs import compare_outputs

    report("fp64: holds; comparing outputs in evaluation")
    faults, missing = compare_outputs(case, examination.theirs.last)
    examination = replace(examination, not_exercised=tuple(missing))
    if not faults:
        return examination
    verdict = replace(examination.verdict, faults=tuple(faults), unlocated="training agrees, evaluation does not")
    return replace(examination, verdict=verdict)


def _tried_further(
    case: Case, program: "Program", examination: Examination, settings: Settings, coverage: Coverage
) -> Examination:
    """Try a case that holds on what its batches never met, and with another bound if its gradient was never or always
    clipped."""
    examination = replace(examination, not_exercised=(*examination.not_exercised, *_tried(case, program, settings)))
    sometimes = coverage.clipping_sometimes(case)
    if sometimes is None:
        return examination
    candidates, second = compare(sometimes, program, settings)
    bound = f"clip_norm {sometimes.clip_norm:.2g}"
    if second.verdict.passed:
        return replace(
            examination, not_exercised=(*examination.not_exercised, f"clipping holds with {bound}, checked in addition")
        )
    verdict = explain(candidates, second, settings)
    return replace(second, verdict=replace(verdict, faults=tuple(f"{bound}: {line}" for line in verdict.faults)))


def _tried(case: Case, program: "Program", settings: Settings) -> Iterator[str]:
    """Whether the case holds on what its batches never met; a difference is reported but is no fault."""
    from parity.unexercised.conditions import cases_that_meet

    whole = Settings(steps=2, seed=settings.seed)  # micro-batches may ignore different numbers of labels
    if replace(whole, steps=settings.steps) != settings:
        program = program_of(case, "fp64", whole)
    for how, changed in cases_that_meet(case, settings.seed):
        report(f"fp64: holds; trying {how}")
        verdict = compare(changed, program, whole)[1].verdict
        yield f"{how}, checked in addition: {'holds' if verdict.passed else f'differs, {verdict.faults[0]}'}"


def _examine_low_precision(case: Case, precision: str, locate: bool, settings: Settings) -> Examination:
    program = program_of(case, precision, settings)
    examination = repeated(case, program, settings, partial(live_reference, case, precision))
    if locate and not examination.verdict.passed:
        return replace(examination, verdict=_explained_low(case, precision, examination.verdict, settings))
    return examination


def _explained_low(case: Case, precision: str, verdict: Verdict, settings: Settings) -> Verdict:
    """Add where float64 differs as well, or else the first module that is less precise than PyTorch's."""
    from parity.compare.activations import activations, first_imprecise

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
    setting = arises(settings, lambda plain: check(case, precision, **asdict(plain)).passed)
    reason = setting or "every module's first output is as precise as PyTorch's"
    return replace(verdict, unlocated=f"agrees in fp64, differs in {precision}: {reason}")


def _examine_quantized(case: Case, precision: str, locate: bool, settings: Settings) -> Examination:
    """Compare quantization in float64; with `locate`, find which one differs."""
    _, examination = compare(case, program_of(case, precision, settings), settings)
    if not locate or examination.verdict.passed:
        return examination
    from parity.compare.quantized import explain_quantization

    exact = check(case, locate=True, **asdict(settings))
    return replace(examination, verdict=explain_quantization(case, precision, examination, exact, settings))


_EXAMINE = {"fp64": _examine_float64, **{EXACT + name: _examine_quantized for name in FP8}}
"""How each precision is examined that is not a low one."""
