"""Where chaos begins in a long run, so that it is not mistaken for a bug.

Training can amplify rounding without bound: with too large a learning rate, two runs of the same program diverge if a
single last digit differs. The amplification is measured by running PyTorch again from weights one ulp off. A difference
of JAX within that is chaos; a larger one is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

JUDGED = 20
"""Steps to which the bars of float64 apply as they are; later steps are judged by the noise."""
RUNS = 5
"""Number of PyTorch's runs from weights one ulp off. Of ten such runs of chaotic cases (`mlp` and `gpt2`, lr 0.1, ten
seeds), any five predicted the distances of the others to a factor of 2."""
ROUNDING = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Trajectory:
    """How far apart two runs are at each step, and how far apart rounding alone would take them.

    All arrays are float64[steps]. Distances are relative to the losses of PyTorch's run, each the largest so far.

    Attributes:
      apart: JAX's distances.
      one_ulp: Distances of the farthest of PyTorch's runs from weights one ulp off.
      spread: Ratio of the farthest of these runs to the nearest, 1 or more.
      limit: Largest `one_ulp` at which a difference is judged by the bars alone.
    """

    apart: np.ndarray
    one_ulp: np.ndarray
    spread: np.ndarray
    limit: np.ndarray

    @property
    def noise(self) -> np.ndarray:
        """The distance that rounding may reach: the farthest of PyTorch's runs times the spread of these runs."""
        return self.one_ulp * self.spread

    @property
    def chaos(self) -> int | None:
        """The first step, counted from 1, at which one ulp alone exceeds the limit; None if there is none."""
        return _first(self.one_ulp > self.limit)

    @property
    def parted(self) -> int | None:
        """The first step at which JAX's distance exceeds the limit; None if there is none."""
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
    """Create a trajectory.

    Args:
      apart: JAX's relative distances, float64[steps].
      one_ulp: Those of PyTorch's runs from weights one ulp off, at least one run.
      limit: As in `Trajectory`.

    Returns:
      The trajectory.

    >>> found = trajectory([1e-9, 4e-8], [[1e-9, 1e-8], [1e-9, 2e-8]], limit=1e-8)
    >>> found.spread.tolist(), found.noise.tolist(), found.chaos, found.parted
    ([1.0, 2.0], [1e-09, 4e-08], 2, 2)
    """
    runs = np.array([_so_far(run) for run in one_ulp])
    # A distance below the rounding of a loss is 0 or not by chance and tells nothing about the spread.
    seen = np.maximum(runs, ROUNDING)
    with np.errstate(invalid="ignore"):
        spread = np.maximum.accumulate(np.nan_to_num(seen.max(0) / seen.min(0), nan=1.0, posinf=np.inf))
    return Trajectory(_so_far(apart), runs.max(0), spread, np.broadcast_to(limit, len(apart)))


def _so_far(distances: Sequence[float] | np.ndarray) -> np.ndarray:
    largest: np.ndarray = np.maximum.accumulate(np.nan_to_num(distances, nan=np.inf, posinf=np.inf))
    return largest


def _first(steps: np.ndarray) -> int | None:
    return int(np.argmax(steps)) + 1 if steps.any() else None
