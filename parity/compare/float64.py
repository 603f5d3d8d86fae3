"""The comparison of two float64 runs, which tells whether the programs mean the same."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from parity.case import Case
from parity.compare.examination import Examination, JaxProgram, judge, train
from parity.compare.reference import live_reference
from parity.compare.verdict import Verdict, same_meaning
from parity.progress import report
from parity.record import Record
from parity.settings import Settings
from parity.unexercised.coverage import Coverage

ROUNDING = 1e-5
"""Largest relative difference that the rounding of constants to float32 may explain."""
NUDGES = 3
"""Number of JAX's runs with its constants changed within their rounding."""
LISTED = 3
"""Number of names that a line lists."""


def compare(
    case: Case, program: JaxProgram, settings: Settings, coverage: Coverage | None = None
) -> tuple[list[Case], Examination]:
    """Compare a case in float64: the first step, and the others if it holds.

    Args:
      case: The case.
      program: JAX's training step.
      settings: The settings.
      coverage: Observes PyTorch's run of all steps.

    Returns:
      A tuple (versions of the case that mean the same, to locate a difference in, the last of which holds if any does;
      examination, of the first step alone if that differs).
    """
    if settings.steps > 1:
        candidates, first = _compared(case, program, replace(settings, steps=1), None)
        if not first.verdict.passed:
            return candidates, first
        report(f"{program.precision}: the first loss, gradients and update are equal")
    return _compared(case, program, settings, coverage)


def _compared(
    case: Case, program: JaxProgram, settings: Settings, coverage: Coverage | None
) -> tuple[list[Case], Examination]:
    examination = train(case, program, settings, live_reference(case, program.precision, settings, coverage))
    if not examination.verdict.passed:
        examination = _beside_one_ulp(case, program.precision, examination, settings)
    if examination.verdict.passed:
        return [case], examination
    return _with_other_constants(case, program, examination, settings)


def _beside_one_ulp(case: Case, precision: str, examination: Examination, settings: Settings) -> Examination:
    """Compare parameters and buffers that differ again, beside PyTorch's runs from weights one ulp off.

    An optimizer that divides a gradient by its own size makes visible steps of rounding noise. The running mean of a
    batch norm follows such steps of a bias before it.
    """
    if not all(fault.startswith(("params", "buffers")) for fault in examination.verdict.faults):
        return examination
    second = judge(examination.ours, live_reference(case, precision, settings, judged=0))
    note = "parameters whose gradient is rounding noise are as far apart as in PyTorch's runs from weights one ulp off"
    return replace(second, notes=(note,)) if second.verdict.passed else examination


def _with_other_constants(
    case: Case, program: JaxProgram, examination: Examination, settings: Settings
) -> tuple[list[Case], Examination]:
    """Compare a case that differs again, with constants that mean the same.

    PyTorch rounds a constant that it computes when the model is built to float32, and JAX one that NumPy computes.
    """
    from parity.sides.torch_side import with_exact_constants

    exact, names = with_exact_constants(case)
    examinations = [(case, examination)]
    notes: tuple[str, ...] = ()
    if names:
        # JAX's run is the same: it computes its own constants.
        second = judge(examination.ours, live_reference(exact, program.precision, settings))
        notes = (f"{_listed(names)} rounded to float32 in PyTorch; compared in float64",)
        examinations.append((exact, second))
        if second.verdict.passed:
            return [case, exact], replace(second, notes=notes)
    close = [(compared, e) for compared, e in examinations[::-1] if _rel_max(e.verdict) <= ROUNDING]
    if program.precision != "fp64":  # quantization amplifies the rounding of constants
        close = []
    nudged = _nudged_runs(case, program, examination.ours, settings) if close else []
    for compared, failed in close if nudged else []:
        verdict = same_meaning(failed.ours, failed.theirs, judged=settings.steps, nudged=nudged)
        if verdict.passed:
            line = f"JAX's constants rounded to float32 explain the difference, {verdict.grad_rel_max:.1e}"
            notes = (*(notes if compared is exact else ()), line)
            return [compared], replace(failed, verdict=verdict, notes=notes)
    return [compared for compared, _ in examinations], examination


def _rel_max(verdict: Verdict) -> float:
    return max(verdict.loss_rel, verdict.grad_rel_max)


def _nudged_runs(case: Case, program: JaxProgram, ours: Record, settings: Settings) -> list[Record]:
    """JAX's runs with its float32 constants changed within their rounding; none if it has no such constants."""
    from parity.sides.torch_side import initial_weights

    run = partial(program.run, case, initial_weights(case, settings.seed), steps=settings.steps, seed=settings.seed)
    first = run(nudge=0)
    # Losses too: of a port whose contract names no gradients, they are PyTorch's.
    if np.array_equal(first.losses, ours.losses) and all(
        np.array_equal(x, ours.grads[name]) for name, x in first.grads.items()
    ):
        return []
    return [first, *(run(nudge=i) for i in range(1, NUDGES))]


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many follow."""
    more = f" and {len(names) - LISTED} more are" if len(names) > LISTED else " is" if len(names) == 1 else " are"
    return ", ".join(names[:LISTED]) + more
