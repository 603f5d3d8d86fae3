"""A verdict with the runs that it rests on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from parity.bars import FP8_RATIO_BAR, RATIO_BAR
from parity.case import Case
from parity.compare.reference import Reference
from parity.compare.verdict import Verdict, same_meaning, same_precision
from parity.record import Record, Tensors
from parity.settings import Settings, fp8_policy, in_double
from parity.sides.nonfinite_loss import cause_of_nonfinite

if TYPE_CHECKING:
    from parity.sides.jax_side import Program


class JaxProgram(Protocol):
    """JAX's side of a check: `parity.sides.jax_side.Program`, or the step of a port (`parity.verify.port_program`)."""

    precision: str

    def run(self, case: Case, weights: Tensors, *, steps: int, seed: int, nudge: int | None = None) -> Record:
        """Train from PyTorch's weights, as `Program.run`."""
        ...


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


def program_of(case: Case, precision: str, settings: Settings) -> "Program":
    """Return JAX's training step with these settings."""
    from parity.sides.jax_side import Program

    return Program(case, precision, accumulate=settings.accumulate, remat=settings.remat)


def train(case: Case, program: JaxProgram, settings: Settings, reference: Reference) -> Examination:
    """Train in JAX and compare with PyTorch's side.

    Raises:
      UserError: PyTorch's loss is inf or NaN in float64.
    """
    _check_finite(case, settings, reference.truth)
    ours = program.run(case, reference.weights, steps=settings.steps, seed=settings.seed)
    if in_double(program.precision):
        return judge(ours, reference)
    theirs, one_ulp, truth = reference.theirs, reference.one_ulp, reference.truth
    noise = reference.reordered or one_ulp
    bar = FP8_RATIO_BAR if fp8_policy(program.precision) else RATIO_BAR
    return Examination(same_precision(ours, [theirs, *noise], truth, one_ulp, bar), ours, theirs, truth)


def judge(ours: Record, reference: Reference) -> Examination:
    """Compare two float64 runs."""
    theirs = reference.theirs
    return Examination(same_meaning(ours, theirs, reference.one_ulp), ours, theirs, reference.truth)


def _check_finite(case: Case, settings: Settings, truth: Record) -> None:
    """Nothing can be compared with a loss that is inf or NaN in PyTorch itself."""
    from jaxtrain.errors import UserError

    for step in np.flatnonzero(~np.isfinite(truth.losses))[:1]:
        *_, batch = case.batches(settings.seed, int(step) + 1)
        raise UserError(
            f"PyTorch's loss is {truth.losses[step]} in step {step + 1}, in float64 too: {cause_of_nonfinite(batch)}"
        )
