"""A case: one model in both frameworks, with one loss, one stream of batches and one optimizer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.optimizer import AdamW, Optimizer

if TYPE_CHECKING:
    import torch

    from jaxtrain.interop import NameTable
    from jaxtrain.step import LossFn

Batch = Mapping[str, np.ndarray]
"""Arrays by name, each with the batch's rows on its first axis; floating ones in float32, so that every precision
computes on the same numbers."""


@dataclass(frozen=True)
class Case:
    """One training run, said twice.

    `torch_model()` makes the model in float32, its weights drawn from PyTorch's generator, which is seeded before.
    `torch_loss(model, batch)`, on tensors, and `loss_fn(params, batch, rng)`, as `jaxtrain.train_step` takes it, are
    sums with weights, and all micro-batches of a window must weigh the same. `params_like` has the shapes of the JAX
    parameters (`jax.ShapeDtypeStruct`s do), which `names` finds in the PyTorch model, and `state_like` of the model
    state, which `buffers` finds; a table that is None is proposed (`parity.weights`): `tables` are those to use.
    `batch(seed, rows)` draws a batch; an effective batch has `rows` of them. Most is shown by a learning rate that
    moves the parameters, and by a `clip_norm` between the gradients' norms: a gradient always clipped hides a wrong
    scale; None clips nothing. Where `loss_fn` drops, by masks of `jax.random.bernoulli`, PyTorch's model is to drop
    the same activations in the same order: it is given the same masks.
    """

    name: str
    torch_model: "Callable[[], torch.nn.Module]"
    torch_loss: "Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, int]]"
    loss_fn: "LossFn"
    params_like: Any
    names: "NameTable | Any"
    batch: Callable[[int, int], Batch]
    rows: int
    optimizer: AdamW | Optimizer
    clip_norm: float | None
    state_like: Any = None
    buffers: "NameTable | None" = None

    @property
    def has_tables(self) -> bool:
        """Whether the case names all its tables."""
        return self.names is not None and (self.buffers is not None or self.state_like is None)

    @property
    def tables(self) -> "tuple[NameTable, NameTable | None]":
        """The tables of the parameters and of the buffers; None for a model without state.

        Raises:
          ValueError: A table was left out: `parity.weights.with_tables` proposes it.
        """
        if not self.has_tables:
            raise ValueError(f"{self.name} has no name table: pass the case through parity.weights.with_tables")
        return self.names, self.buffers

    def batches(self, seed: int, steps: int) -> Iterator[Batch]:
        """A different effective batch for each step, the same ones for the same seed."""
        for step in range(steps):
            yield self.batch(int(np.random.SeedSequence([seed, step]).generate_state(1)[0]), self.rows)
