"""The parts of a training run that depend on what is learned."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data import Example, Source, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.losses import cross_entropy
from jaxtrain.objective import Loss, LossFn


class Predicted(NamedTuple):
    """What a model makes of a batch, and what it should.

    `logits` [B, classes], or [B, T, classes] where every token is predicted; `targets` int [B] or [B, T]; `weight`
    float32, of that shape: 0 where there is nothing to predict.
    """

    logits: Any
    targets: Any
    weight: Any

    def loss(self) -> Loss:
        """The cross-entropy, in nats."""
        return Loss((cross_entropy(self.logits, self.targets) * self.weight).sum(), self.weight.sum())

    def accuracy(self) -> Loss:
        """The share of targets that are the likeliest."""
        right = jnp.where(self.logits.argmax(-1) == self.targets, self.weight, 0)
        return Loss(right.sum(), self.weight.sum())


@dataclass(frozen=True)
class Task:
    """First parameters and the loss; sources of examples; how to count and judge them."""

    params: Any
    loss_fn: LossFn
    predict: Callable[[Any, Any, Any], Predicted]
    """`predict(params, batch, model_state)`: what the loss is of, in evaluation."""
    train: Source
    validation: Source
    eval_rows: int
    """Validation examples to an evaluation."""
    classes: int
    """A fresh model's loss is about log(classes)."""
    unit: str
    """What throughput counts: "tokens" or "examples"."""
    units_per_row: int
    texts: Tokenizer | None = None
    """What the targets are tokens of; None for classes."""
    class_names: Sequence[str] = ()
    """Of targets that are classes."""
    given: Callable[[Example], str] | None = None
    """The text that an example gives the model, where it is not the one to predict."""
    model_state: Any = None
    """BatchNorm's first running statistics, where there are any; the loss is then given and returns them."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Of integers in a batch that are no classes, by name, how many values they may have: from 0 up."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What to tell the user of the data before the first step."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Losses that a useful model must beat, by name, in nats."""
    sample: Callable[[Any, int], str] | None = None
    """`sample(params, seed)`: text from the model, where it makes any."""
    names: NameTable | None = None
    """PyTorch's names for the parameters, in the order of its model; without them no checkpoint comes in or out."""
    buffers: NameTable | None = None
    """PyTorch's names for `model_state`."""


def initialised(init: Callable[[], Any]) -> Any:
    """`init()`, once its arrays are known to fit. Raises `UserError` where the device cannot hold them."""
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init)))
    memory = _memory()
    # With as much again of gradients; an optimizer's moments are to come.
    if 2 * needed > memory:
        raise UserError(
            f"the parameters take {needed / 2**30:,.1f} GiB, and their gradients as much again, of the "
            f"{memory / 2**30:,.1f} GiB there are: make the model's sizes smaller"
        )
    return init()


def _memory() -> int:
    """Bytes of the first device; of the machine, where that is its CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def row_weights(batch: Mapping[str, Any], rows: int) -> Any:
    """float32 [rows]: 1 for an example, 0 for a row that only fills up an evaluation's last batch."""
    return batch["weight"] if "weight" in batch else jnp.ones(rows, np.float32)
