"""The parts of a training run that depend on what is learned."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.cost import device_memory
from jaxtrain.data import Example, Source, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.losses import cross_entropy
from jaxtrain.step import Loss, LossFn


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
    """What makes the first parameters, and the loss; sources of examples; how to count and judge them."""

    init: Callable[[], tuple[Any, Any]]
    """The first parameters, and BatchNorm's first running statistics: None where there are none; the loss is else given
    and returns them."""
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
    sharding: Mapping[str, PartitionSpec] | None = None
    """By path, the axes of a mesh that divide each parameter's; None for `jaxtrain.distributed`'s own choice."""
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

    @property
    def params(self) -> Any:
        """The first parameters, made on one device when they are first asked for."""
        return self._first[0]

    @property
    def model_state(self) -> Any:
        """The first running statistics."""
        return self._first[1]

    @cached_property
    def _first(self) -> tuple[Any, Any]:
        check_memory(self.init)
        with jax.ensure_compile_time_eval():  # to be kept, also where a trace asks first
            return self.init()


def check_memory(init: Callable[[], Any], devices: int = 1) -> None:
    """Raises `UserError` where so many devices cannot hold what `init` makes, divided over them."""
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init)))
    # Those of a CPU share the machine's.
    memory = device_memory() * (1 if jax.default_backend() == "cpu" else devices)
    # With as much again of gradients; an optimizer's moments are to come.
    if 2 * needed > memory:
        raise UserError(
            f"the parameters take {needed / 2**30:,.1f} GiB, and their gradients as much again, of the "
            f"{memory / 2**30:,.1f} GiB there are: make the model's sizes smaller"
        )


def row_weights(batch: Mapping[str, Any], rows: int) -> Any:
    """float32 [rows]: 1 for an example, 0 for a row that only fills up an evaluation's last batch."""
    return batch["weight"] if "weight" in batch else jnp.ones(rows, np.float32)
