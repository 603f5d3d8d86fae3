"""The values of a training run that are compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Tensors = dict[str, np.ndarray]
"""Parameters, gradients or moments under PyTorch's names, in PyTorch's layouts."""


def as_pairs(x: np.ndarray) -> np.ndarray:
    """Return complex numbers as pairs of real ones, which PyTorch's optimizers update each by itself; others as given.

    >>> as_pairs(np.array([1 + 2j])).tolist()
    [[1.0, 2.0]]
    """
    return np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x


def added(a: Tensors | None, b: Tensors) -> Tensors:
    """Return the sum of gradients; the second ones alone if there are no others.

    >>> added({"w": np.ones(2)}, {"w": np.ones(2)})["w"].tolist()
    [2.0, 2.0]
    """
    return b if a is None else {name: a[name] + x for name, x in b.items()}


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment: parameters, the optimizer's moments by PyTorch's names, and buffers."""

    params: Tensors
    moments: Mapping[str, Tensors]
    buffers: Tensors


@dataclass(frozen=True)
class Step:
    """One step of the reference.

    Attributes:
      micro_batches: The micro-batches of its window.
      before: State before the step.
      loss: Mean loss of the window.
      grads: Unscaled gradients before clipping.
      fed: Gradients that the optimizer received.
      after: State after the step.
    """

    micro_batches: Sequence[Mapping[str, np.ndarray]]
    before: Snapshot
    loss: float
    grads: Tensors
    fed: Tensors
    after: Snapshot


@dataclass(frozen=True)
class Record:
    """One run of a case.

    Attributes:
      losses: Mean loss of each step's batch before its update, float64[steps].
      grads: Gradients of the first update, unscaled and clipped; the sum of those of `Case.turns` updates.
      first: State after the first update, or after `Case.turns` updates.
      last: State after the last step.
      scales: Loss scale at the start and after each step, float64[steps + 1]; 1 without scaling.
      grad_norms: Unscaled gradient norms before clipping, float64[steps].
    """

    losses: np.ndarray
    grads: Tensors
    first: Snapshot
    last: Snapshot
    scales: np.ndarray
    grad_norms: np.ndarray

    @property
    def skipped(self) -> frozenset[int]:
        """The steps that overflowed and therefore changed only the loss scale."""
        return frozenset(np.flatnonzero(np.diff(self.scales) < 0).tolist())


def norm(tensors: Iterable[np.ndarray]) -> float:
    """Return the Euclidean norm of all elements."""
    return math.sqrt(sum(float(np.vdot(x, x)) for x in map(np.float64, map(as_pairs, tensors))))
