"""The check that both sides quantize alike: fp8 training whose every other operation is in float64.

The programs are those that train: on JAX's side the whole step of the fp8 policy, on PyTorch's its fp8 layers. Only the
rounding to 8 bits remains a part of what they compute. Two float64 runs round the same numbers to 8 bits, unless one
is within 1e-16 of the middle between two, so that they must be equal to the bars of float64, while a scale of another
tensor, another format, or an operand of another step is a difference of 1e-3.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from parity.bars import FIRST_BAR
from parity.case import Case
from parity.compare.activations import activations, first_requantized
from parity.compare.examination import Examination
from parity.compare.verdict import Verdict, relative
from parity.divergence import Divergence
from parity.record import Record
from parity.settings import Settings


def explain_quantization(
    case: Case, precision: str, examination: Examination, exact: Verdict, settings: Settings
) -> Verdict:
    """Add which quantization differs, or where the case differs in float64 as well.

    Args:
      case: The case.
      precision: One of `parity.settings.EXACT`.
      examination: The examination of the case, which differs.
      exact: The verdict on the case in fp64.
      settings: The settings.
    """
    verdict = examination.verdict
    if not exact.passed:
        return replace(exact, faults=verdict.faults, stage=f"in fp64 as well: {exact.stage or exact.faults[0]}")
    found = _first(case, precision, examination, settings)
    return replace(verdict, first_divergence=found, stage=f"{found.stage}: agrees in fp64, quantized differently")


def _first(case: Case, precision: str, examination: Examination, settings: Settings) -> Divergence:
    ours, theirs = examination.ours, examination.theirs
    step = _first_step(ours, theirs)
    if step > 1:
        return _divergence("state", step, f"what fp8 keeps after step {step - 1}: amax history or quantized parameters")
    if _apart(relative({"": ours.losses[:1]}, {"": theirs.losses[:1]})):
        values = activations(case, precision, accumulate=settings.accumulate, seed=settings.seed)
        return first_requantized(values) or _divergence("forward", 1, "loss")
    return _of_gradients(relative(ours.grads, theirs.grads))


def _first_step(ours: Record, theirs: Record) -> int:
    """Return the first step whose loss or gradient norm differs; 1 if none does."""
    apart = [np.abs(a - b) / np.abs(b) for a, b in ((ours.losses, theirs.losses), (ours.grad_norms, theirs.grad_norms))]
    differs = np.flatnonzero(~(np.max(apart, axis=0) <= FIRST_BAR))  # or NaN
    return 1 if not differs.size or _apart(relative(ours.grads, theirs.grads)) else int(differs[0]) + 1


def _of_gradients(distances: Mapping[str, float]) -> Divergence:
    """Where the backward pass, which comes from the last parameter, first differs.

    A wrong gradient of a product's input reaches all parameters before it, one of its weight no other.
    """
    wrong = [name for name, distance in distances.items() if distance > FIRST_BAR]
    if not wrong:
        return _divergence("update", 1, "parameters")
    if all(name.endswith("weight") for name in wrong) and len(wrong) < len(distances):
        return _divergence("backward", 1, f"gradient of {wrong[-1]} alone: its product with the input")
    return _divergence("backward", 1, f"gradients from {wrong[-1]} on: the input of the product after it")


def _apart(distances: Mapping[str, float]) -> bool:
    return max(distances.values()) > FIRST_BAR


def _divergence(stage: str, step: int, what: str) -> Divergence:
    return Divergence(
        stage=stage,
        step=step,
        torch=what,
        torch_source="",
        jax_source="",
        last_match="",
        parameters=(),
        torch_at=None,
        jax_at=None,
    )
