"""What a check did not exercise: a convention that no input met is not proven.

One batch that never clips, or whose gradient never reaches half of an embedding, says nothing of clipping or of that
half.
"""

from dataclasses import replace

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
