"""The second stage: twenty updates in float64, and again in float32 beside PyTorch's own distance from them."""

from collections.abc import Sequence
from functools import partial

from parity.bars import RATIO_BAR
from parity.compare.examination import Examination
from parity.compare.float64 import compare
from parity.compare.low_precision import repeated
from parity.progress import report
from parity.settings import Settings
from parity.verify.contract import Target
from parity.verify.difference import Difference, Held
from parity.verify.lines import located, lossy_line
from parity.verify.noise import reference
from parity.verify.port_program import PortProgram
from parity.verify.source_case import SourceCase
from parity.verify.updates import over_bars, port_updates, torch_updates

STAGE = "numbers"
UPDATES = 20


def numbers(case: SourceCase, target: Target, seed: int) -> Difference | Held:
    """Compare the numbers of both sides.

    Args:
      case: The source.
      target: The port.
      seed: Seed of weights and data.

    Returns:
      The first difference, or what holds. A step that cannot be computed in float64 is compared in float32 alone, with
      a note.
    """
    exact = _in_float64(case, target, seed)
    if isinstance(exact, Difference):
        return exact
    rounded = _in_float32(case, target, seed, is_exact=bool(exact.figures))
    if isinstance(rounded, Difference):
        return rounded
    notes = [*exact.notes, *rounded.notes]
    if target.gradients is None:
        notes.append("first gradients are compared by the parameters after update 1: the contract names no gradients")
    what = "; ".join(filter(None, [exact.what, rounded.what]))
    return Held(f"{case.most(UPDATES)} updates in {what}", exact.figures | rounded.figures, tuple(notes))


def _in_float64(case: SourceCase, target: Target, seed: int) -> Difference | Held:
    program = PortProgram(target, "fp64")
    refusal = program.refusal(case, seed)
    if refusal is not None:
        return Held("", notes=(f"not compared in float64, and no bugs planted: {refusal}",))
    candidates, examination = compare(case, program, Settings(steps=case.most(UPDATES), seed=seed))
    verdict = examination.verdict
    if not verdict.passed:
        versions = [version for version in candidates if isinstance(version, SourceCase)]
        return _first(versions, target, program, examination, seed)
    figures = {"losses": verdict.loss_rel, "parameters": verdict.param_rel_max}
    what = ", ".join(f"{name} {x:.0e}" for name, x in figures.items())
    return Held(f"float64: {what}", figures, examination.notes)


def _in_float32(case: SourceCase, target: Target, seed: int, is_exact: bool) -> Difference | Held:
    program, settings = PortProgram(target, "fp32"), Settings(steps=case.most(UPDATES), seed=seed)
    low = repeated(case, program, settings, partial(reference, case))
    ratio = low.verdict.error_ratio
    assert ratio is not None
    if not low.verdict.passed:
        return _imprecise(case, target, low, seed, is_exact)
    return Held(f"float32: {ratio:.2f} times PyTorch's own distance from float64", {"float32": ratio})


def _first(
    versions: Sequence[SourceCase], target: Target, program: PortProgram, examination: Examination, seed: int
) -> Difference:
    """The first tensor over its bar, update by update, and its lines.

    Of versions of the source that mean the same, it is that which the port follows for longest.
    """
    report("fp64: differs; searching the first tensor")
    ordered = [(*_first_over_bar(case, target, program, seed), case) for case in versions]
    _, found, case = max(ordered, key=lambda entry: entry[0])
    if found is None:  # a value that is judged beside its noise alone
        return Difference(STAGE, examination.verdict.faults[0])
    return located(found, case, target, seed)


def _first_over_bar(case: SourceCase, target: Target, program: PortProgram, seed: int) -> tuple[int, Difference | None]:
    """Return the first difference and its place in the order of a run."""
    steps, place = case.most(UPDATES), 0
    pairs = zip(port_updates(case, program, steps, seed), torch_updates(case, steps, seed), strict=True)
    for number, (ours, theirs) in enumerate(pairs, start=1):
        for found in over_bars(ours, theirs, number, target.gradients is not None):
            place += 1
            if found is not None:
                return place, found
    return place, None


def _imprecise(case: SourceCase, target: Target, low: Examination, seed: int, is_exact: bool) -> Difference:
    """What is over its bar in float32: losses, gradients, parameters or buffers as a whole, or one tensor."""
    fault = low.verdict.faults[0]
    tensor, worst = fault.partition(":")[0], low.verdict.worst_tensor
    is_one = worst is not None and tensor == worst.what
    return Difference(
        STAGE,
        f"in float32 {fault}" + "; its values in float64 are PyTorch's" * is_exact,
        tensor,
        (tensor,),
        distance=worst.ratio if worst is not None and is_one else low.verdict.error_ratio,
        bar=worst.bar if worst is not None and is_one else RATIO_BAR,
        target_line=lossy_line(case, target, seed),
    )
