"""The second stage: twenty updates in float64, and again in float32 beside PyTorch's own distance from them."""

from functools import partial

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
    settings = Settings(steps=UPDATES, seed=seed)
    program = PortProgram(target, "fp64")
    refusal = program.refusal(case, seed)
    figures, notes = dict[str, float](), list[str]()
    if refusal is None:
        candidates, examination = compare(case, program, settings)
        if not examination.verdict.passed:
            return _first(candidates[-1], target, program, examination, seed)
        verdict = examination.verdict
        figures |= {"loss": verdict.loss_rel, "parameters": verdict.param_rel_max}
        notes += examination.notes
    else:
        notes.append(f"not compared in float64, and no bugs planted: {refusal}")
    if target.gradients is None:
        notes.append("first gradients are compared by the parameters after update 1: the contract names no gradients")
    low = repeated(case, PortProgram(target, "fp32"), settings, partial(reference, case))
    if not low.verdict.passed:
        return _imprecise(target, case, low, seed)
    assert low.verdict.error_ratio is not None
    figures["float32"] = low.verdict.error_ratio
    exact = "" if refusal else f"float64: losses {figures['loss']:.0e}, parameters {figures['parameters']:.0e}; "
    what = f"{UPDATES} updates in {exact}float32: {figures['float32']:.2f} times PyTorch's own distance from float64"
    return Held(what, figures, tuple(notes))


def _first(case: SourceCase, target: Target, program: PortProgram, examination: Examination, seed: int) -> Difference:
    """The first tensor over its bar, update by update, and its lines."""
    report("fp64: differs; searching the first tensor")
    pairs = zip(port_updates(case, program, UPDATES, seed), torch_updates(case, UPDATES, seed), strict=True)
    for number, (ours, theirs) in enumerate(pairs, start=1):
        for found in over_bars(ours, theirs, number, target.gradients is not None):
            return located(found, case, target, seed)
    return Difference(STAGE, examination.verdict.faults[0])  # of a value that is judged beside its noise alone


def _imprecise(target: Target, case: SourceCase, low: Examination, seed: int) -> Difference:
    fault = low.verdict.faults[0]
    tensor, worst = fault.partition(":")[0], low.verdict.worst_tensor
    ratio = low.verdict.error_ratio if worst is None or worst.ratio <= worst.bar else worst.ratio
    return Difference(
        STAGE,
        f"in float32 {fault}; its values in float64 are PyTorch's",
        tensor,
        (tensor,),
        distance=ratio,
        target_line=lossy_line(case, target, seed),
    )
