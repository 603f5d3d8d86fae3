"""What a check did not exercise, and so does not prove.

Batches whose gradient is never clipped, or never reaches half of an embedding, prove nothing about clipping or that
half.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from parity.case import Case
from parity.record import Step, norm

LISTED = 5
"""Number of partly reached parameters that are named, the least reached first."""


class Coverage:
    """Observes the reference run, as the `watch` of `torch_side.run`.

    Attributes:
      norms: Gradient norm of each step, before clipping.
      reached: Which elements of each parameter ever had a gradient other than zero.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.reached: dict[str, np.ndarray] = {}

    def __call__(self, step: Step) -> None:
        """Record a step."""
        self.norms.append(norm(step.grads.values()))
        for name, grad in step.grads.items():
            self.reached[name] = self.reached.get(name, False) | (grad != 0)

    def not_exercised(self, case: Case) -> tuple[str, ...]:
        """Return a line for each behavior that was not exercised."""
        return (*self._steps(), *self._clipping(case), *self._parameters(case))

    def clipping_sometimes(self, case: Case) -> Case | None:
        """Return the case with a bound that clips some steps only; None if its own bound does so or it has none."""
        if case.clip_norm is None or not self._clipping(case):
            return None
        return replace(case, clip_norm=float(np.median(self.norms)))

    def _steps(self) -> list[str]:
        if len(self.norms) > 1:
            return []
        return ["one step exercises no momentum, no decay of moments and no schedule"]

    def _clipping(self, case: Case) -> list[str]:
        if case.clip_norm is None:
            return []
        clipped = [norm > case.clip_norm for norm in self.norms]
        if any(clipped) and not all(clipped):
            return []
        norms = f"gradient norms {min(self.norms):.2g} to {max(self.norms):.2g}, clip_norm {case.clip_norm:g}"
        return [f"every step was clipped: {norms}" if any(clipped) else f"no step was clipped: {norms}"]

    def _parameters(self, case: Case) -> list[str]:
        from parity.sides.torch_side import seeded_model
        from parity.unexercised.padding import padding_rows

        partly_reached = {name: reached.copy() for name, reached in self.reached.items() if not reached.all()}
        with seeded_model(case, 0) if partly_reached else nullcontext() as model:
            rows = padding_rows(model) if model is not None else {}
        for name, row in rows.items():
            if name in partly_reached:  # its row has no gradient by definition
                partly_reached[name][row] = True
        shares = {name: float(np.mean(reached)) for name, reached in partly_reached.items()}
        partly = sorted((share, name) for name, share in shares.items() if share < 1)
        lines = [f"{name}: {_unreached(partly_reached[name])} never had a gradient" for _, name in partly[:LISTED]]
        more = len(partly) - LISTED
        return [*lines, *([f"{more} more parameters had a gradient only in part"] if more > 0 else [])]


def at_kinks(case: Case, step: int, *, accumulate: int = 1, seed: int = 0) -> dict[str, int]:
    """Count the elements at kinks and ties in one step of the reference, where frameworks choose different slopes.

    Args:
      case: The case.
      step: Number of the step, counted from 1.
      accumulate: Micro-batches per accumulation window.
      seed: Seed of weights, data and dropout.

    Returns:
      Number of elements by name of the function: |x| at 0, a clamp at its bound, a tie for a maximum.
    """
    from parity.sides import torch_side
    from parity.sides.randomness import dropout_masks
    from parity.unexercised.conditions import CONDITIONS, IGNORED, MASKED, ConditionCounter
    from parity.weights import with_tables

    case, watch, losses = with_tables(case), ConditionCounter(), 0

    def watched(model: Any, batch: Any) -> Any:
        nonlocal losses
        losses += 1
        if losses <= (step - 1) * accumulate:
            return case.torch_loss(model, batch)
        with watch:
            return case.torch_loss(model, batch)

    masks = dropout_masks(case, "fp64", accumulate=accumulate, steps=step, seed=seed)
    watched_case = replace(case, torch_loss=watched)
    torch_side.run(watched_case, "fp64", accumulate=accumulate, steps=step, seed=seed, masks=masks)
    kinds = {name: condition.of for name, condition in CONDITIONS.items()}
    return {name: watch.met[of] for name, of in kinds.items() if of not in (IGNORED, MASKED) and watch.met[of]}


def kinks(met: Mapping[str, int]) -> str:
    """Format the counts of `at_kinks`.

    >>> kinks({"abs": 3, "max": 1})
    'kink: input of abs at 0, 3 times; tie: in max, once'
    """
    from parity.unexercised.conditions import CONDITIONS, TIED

    lines = []
    for name, times in met.items():
        of = CONDITIONS[name].of
        what = f"tie:{of.removeprefix(TIED)}" if of.startswith(TIED) else f"kink: {of}"
        lines.append(f"{what}, {'once' if times == 1 else f'{times} times'}")
    return "; ".join(lines)


def _unreached(reached: np.ndarray) -> str:
    """Describe the unreached elements; as rows where whole rows are missing, as in an embedding.

    >>> _unreached(np.array([[True, True], [False, False], [True, True]]))
    '1 of 3 rows'
    >>> _unreached(np.array([True, False, False, False]))
    '3 of 4 elements'
    """
    if reached.ndim > 1:
        rows: np.ndarray = np.any(reached.reshape(len(reached), -1), axis=1)
        if not rows.all() and reached[rows].all():
            return f"{np.sum(~rows)} of {rows.size} rows"
    return f"{np.sum(~reached)} of {reached.size} elements"
