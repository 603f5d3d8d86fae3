"""What a training run leaves behind to be compared."""

from dataclasses import dataclass

import numpy as np

Tensors = dict[str, np.ndarray]
"""Parameters, gradients or moments under PyTorch's names and in PyTorch's layouts."""


@dataclass(frozen=True)
class Snapshot:
    """Parameters, the optimizer's first and second moments, and the model's own state at one moment of a run."""

    params: Tensors
    mu: Tensors
    nu: Tensors
    buffers: Tensors


@dataclass(frozen=True)
class Record:
    """One run of a case.

    `losses` [steps], the mean loss of each step's batch before its update. `grads`: what the optimizer was first fed,
    unscaled and clipped. `first` and `last`: after the first update made and after the last step. `scales`
    [steps + 1]: the loss scale at the start and after each step; 1 without scaling.
    """

    losses: np.ndarray
    grads: Tensors
    first: Snapshot
    last: Snapshot
    scales: np.ndarray

    @property
    def skipped(self) -> frozenset[int]:
        """The steps that overflowed, and so changed nothing but the scale."""
        return frozenset(np.flatnonzero(np.diff(self.scales) < 0).tolist())
