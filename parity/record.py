"""What a training run leaves behind to be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Tensors = dict[str, np.ndarray]
"""Parameters, gradients or moments under PyTorch's names and in PyTorch's layouts."""


@dataclass(frozen=True)
class Snapshot:
    """Parameters, the optimizer's moments by PyTorch's names for them, and the model's own state at one moment."""

    params: Tensors
    moments: Mapping[str, Tensors]
    buffers: Tensors


@dataclass(frozen=True)
class Step:
    """One step of the reference from inside: its micro-batches, `loss`, the mean over them, the gradients as they came
    (unscaled) and as they were `fed` to the optimizer (clipped), and all else before and after."""

    micro_batches: Sequence[Mapping[str, np.ndarray]]
    before: Snapshot
    loss: float
    grads: Tensors
    fed: Tensors
    after: Snapshot


@dataclass(frozen=True)
class Record:
    """One run of a case.

    `losses` [steps], the mean loss of each step's batch before its update. `grads`: what the optimizer was first fed,
    unscaled and clipped. `first` and `last`: after the first update made and after the last step. `scales`
    [steps + 1]: the loss scale at the start and after each step; 1 without scaling. `grad_norms` [steps], unscaled
    and before clipping.
    """

    losses: np.ndarray
    grads: Tensors
    first: Snapshot
    last: Snapshot
    scales: np.ndarray
    grad_norms: np.ndarray

    @property
    def skipped(self) -> frozenset[int]:
        """The steps that overflowed, and so changed nothing but the scale."""
        return frozenset(np.flatnonzero(np.diff(self.scales) < 0).tolist())
