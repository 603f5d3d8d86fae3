"""What a check did not exercise: a convention that no input met is not proven.

One batch that never clips, or whose gradient never reaches half of an embedding, says nothing of clipping or of that
half.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity.case import Case
from parity.record import Step

LISTED = 5
"""Parameters that are only partly reached, of which so many are named, the least reached first."""


class Coverage:
    """Watches the reference train; to be given to `torch_side.run` as `watch`.

    `norms`: of each step's gradient before clipping. `reached`: which elements of each parameter ever had one.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.reached: dict[str, np.ndarray] = {}

    def __call__(self, step: Step) -> None:
        """Take note of a step."""
        self.norms.append(float(np.sqrt(sum(np.vdot(g, g) for g in map(np.float64, step.grads.values())))))
        for name, grad in step.grads.items():
            self.reached[name] = self.reached.get(name, False) | (grad != 0)

    def unseen(self, case: Case) -> tuple[str, ...]:
        """A line for each thing that was not exercised."""
        return (*self._steps(), *self._clipping(case), *self._parameters())

    def clipping_sometimes(self, case: Case) -> Case | None:
        """The case with a bound that clips some steps and leaves others; None where its own does, or has none."""
        if case.clip_norm is None or not self._clipping(case):
            return None
        return replace(case, clip_norm=float(np.median(self.norms)))

    def _steps(self) -> list[str]:
        if len(self.norms) > 1:
            return []
        return ["one step shows nothing of momentum, of moments that decay, of schedules"]

    def _clipping(self, case: Case) -> list[str]:
        if case.clip_norm is None:
            return []
        clipped = [norm > case.clip_norm for norm in self.norms]
        if any(clipped) and not all(clipped):
            return []
        norms = f"gradient norms {min(self.norms):.2g} to {max(self.norms):.2g}, clip_norm {case.clip_norm:g}"
        return [f"every step was clipped: {norms}" if any(clipped) else f"no step was clipped: {norms}"]

    def _parameters(self) -> list[str]:
        shares = {name: float(np.mean(reached)) for name, reached in self.reached.items()}
        partly = sorted((share, name) for name, share in shares.items() if share < 1)
        lines = [f"{name}: {_unreached(self.reached[name])} never had a gradient" for _, name in partly[:LISTED]]
        more = len(partly) - LISTED
        return [*lines, *([f"{more} more parameters had a gradient in part only"] if more > 0 else [])]


def at_kinks(case: Case, step: int, *, accumulate: int = 1, seed: int = 0) -> dict[str, int]:
    """How many elements of the reference's step number `step` sat where a slope is a convention, by the function.

    At a kink (|x| at 0, a clamp at its bound) or at a tie for the maximum frameworks choose differently.
    """
    from parity import torch_side
    from parity.conditions import CONDITIONS, IGNORED, MASKED, PADDED, Watch
    from parity.randomness import dropout_masks
    from parity.weights import with_tables

    case, watch, losses = with_tables(case), Watch(), 0

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
    return {name: watch.met[of] for name, of in kinds.items() if of not in (IGNORED, MASKED, PADDED) and watch.met[of]}


def kinks(met: Mapping[str, int]) -> str:
    """What `at_kinks` found.

    >>> kinks({"abs": 3, "max": 1})
    'kink: input of abs at 0, 3 times; tie: in max, once'
    """
    from parity.conditions import CONDITIONS, TIED

    lines = []
    for name, times in met.items():
        of = CONDITIONS[name].of
        what = f"tie:{of.removeprefix(TIED)}" if of.startswith(TIED) else f"kink: {of}"
        lines.append(f"{what}, {'once' if times == 1 else f'{times} times'}")
    return "; ".join(lines)


def _unreached(reached: np.ndarray) -> str:
    """In rows where whole ones are missing, as of an embedding.

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
