"""Where chaos begins in a long run, so that nobody takes it for a bug.

A training may amplify roundings without bound: with too large a learning rate two runs of one program part, if a
single last digit differs. What a run itself makes of a last digit is measured: PyTorch is run again from weights one
ulp off. A difference of JAX's that is one of that kind is chaos; one that exceeds it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

JUDGED = 20
"""Steps over which the bars of float64 stand as they are; of a longer run those after it are judged by the noise."""
RUNS = 5
"""PyTorch's runs from weights one ulp off. Of ten such runs of chaotic cases (`mlp` and `gpt2`, lr 0.1, ten seeds) any
five foretold, to a factor of 2, how far the others went."""
ROUNDING = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Trajectory:
    """How far apart two runs are at each step, and how far roundings alone would take them.

    All [steps]: relative distances to the losses of PyTorch's run, each the largest so far. `apart`: JAX's.
    `one_ulp`: those of the farthest of PyTorch's runs from weights one ulp off. `spread`: over that of the nearest of
    them, 1 or more. `limit`: how far `one_ulp` may be for a difference to be judged without it.
    """

    apart: np.ndarray
    one_ulp: np.ndarray
    spread: np.ndarray
    limit: np.ndarray

    @property
    def noise(self) -> np.ndarray:
        """As far as roundings may go: as far above the farthest of PyTorch's runs, by a factor, as the nearest is below
        it."""
        return self.one_ulp * self.spread

    @property
    def chaos(self) -> int | None:
        """The step, counted from 1, from which on one ulp alone makes more than can be judged; None if none does."""
        return _first(self.one_ulp > self.limit)

    @property
    def parted(self) -> int | None:
        """The step at which JAX's run is that far from PyTorch's."""
        return _first(self.apart > self.limit)

    def __str__(self) -> str:
        """One line.

        >>> print(trajectory([1e-15, 2e-9, 1e-6], [[1e-15, 1e-9, 3e-7], [1e-16, 1e-9, 2e-6]], limit=1e-8))
        chaos from step 3: one ulp of the weights takes PyTorch's losses beyond 1e-08; JAX's are there from step 3
        >>> print(trajectory([1e-15, 2e-15], [[1e-15, 1e-15]], limit=1e-8))
        no chaos in 2 steps: JAX's losses are within 2e-15 of PyTorch's, PyTorch's own with one ulp more within 1e-15
        """
        if self.chaos is None:
            return (
                f"no chaos in {len(self.apart)} steps: JAX's losses are within {self.apart[-1]:.0e} of PyTorch's, "
                f"PyTorch's own with one ulp more within {self.one_ulp[-1]:.0e}"
            )
        where = "not" if self.parted is None else f"there from step {self.parted}"
        return (
            f"chaos from step {self.chaos}: one ulp of the weights takes PyTorch's losses beyond "
            f"{self.limit[self.chaos - 1]:.0e}; JAX's are {where}"
        )


def trajectory(
    apart: Sequence[float] | np.ndarray,
    one_ulp: Sequence[Sequence[float] | np.ndarray],
    limit: float | np.ndarray,
) -> Trajectory:
    """Of the distances [steps] of JAX's run and of PyTorch's runs from weights one ulp off, one run or more.

    >>> found = trajectory([1e-9, 4e-8], [[1e-9, 1e-8], [1e-9, 2e-8]], limit=1e-8)
    >>> found.spread.tolist(), found.noise.tolist(), found.chaos, found.parted
    ([1.0, 2.0], [1e-09, 4e-08], 2, 2)
    """
    runs = np.array([_so_far(run) for run in one_ulp])
    # Below the rounding of a loss a distance is 0 or not, which says nothing of how they spread.
    seen = np.maximum(runs, ROUNDING)
    with np.errstate(invalid="ignore"):
        spread = np.maximum.accumulate(np.nan_to_num(seen.max(0) / seen.min(0), nan=1.0, posinf=np.inf))
    return Trajectory(_so_far(apart), runs.max(0), spread, np.broadcast_to(limit, len(apart)))


def _so_far(distances: Sequence[float] | np.ndarray) -> np.ndarray:
    largest: np.ndarray = np.maximum.accumulate(np.nan_to_num(distances, nan=np.inf, posinf=np.inf))
    return largest


def _first(steps: np.ndarray) -> int | None:
    return int(np.argmax(steps)) + 1 if steps.any() else None
