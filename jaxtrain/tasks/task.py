"""The parts of a training run that depend on what is learned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.data import Source
from jaxtrain.interop import NameTable
from jaxtrain.objective import LossFn


@dataclass(frozen=True)
class Task:
    """First parameters and the loss; sources of examples; how to count and judge them."""

    params: Any
    loss_fn: LossFn
    train: Source
    validation: Source
    eval_rows: int
    """Validation examples to an evaluation."""
    classes: int
    """A fresh model's loss is about log(classes)."""
    unit: str
    """What throughput counts: "tokens" or "examples"."""
    units_per_row: int
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


def row_weights(batch: Mapping[str, Any], rows: int) -> Any:
    """float32 [rows]: 1 for an example, 0 for a row that only fills up an evaluation's last batch."""
    return batch["weight"] if "weight" in batch else jnp.ones(rows, np.float32)
