"""The memory of a training state by part: what a run keeps on a device between steps."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxtrain.models import QuantizedKernel
from jaxtrain.optim import Blockwise
from jaxtrain.paths import Frozen, partition
from jaxtrain.step import TrainState


class StatePart(NamedTuple):
    """A part of a state in one dtype.

    Attributes:
      name: The part, such as "frozen parameters".
      dtype: Its dtype; "nf4" for quantized kernels with their magnitudes and scales.
      bytes: Its bytes on one device.
    """

    name: str
    dtype: str
    bytes: int


def state_parts(state: TrainState, frozen: Frozen) -> list[StatePart]:
    """Return the parts of a state.

    Args:
      state: A state or its shapes; of an array with a sharding the share of one device is counted.
      frozen: Predicate on the paths of parameters that are not trained.

    Returns:
      The parts that are not empty.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxtrain import Loss, train_step
      >>> def loss_fn(params, batch, rng):
      ...     return Loss((batch @ params["base"] + params["bias"]).sum(), len(batch)), {}
      >>> frozen = lambda path: path == "base"
      >>> step = train_step(loss_fn, optax.adam(1e-3), frozen=frozen)
      >>> state = step.shapes({"base": jnp.ones((4, 2), jnp.bfloat16), "bias": jnp.ones(2)})
      >>> for part in state_parts(state, frozen):
      ...     print(*part, sep=", ")
      frozen parameters, bfloat16, 16
      trained parameters, float32, 8
      optimizer state, float32, 16
      optimizer state, int32, 4
    """
    trained, untrained = partition(state.params, frozen)
    named = {
        "frozen parameters": untrained,
        "trained parameters": trained,
        "optimizer state": state.opt_state,
        "moving average": state.ema,
        "compensation of the parameters": state.compensation,
        "model state": state.model_state,
        "scales of 8-bit products": state.scales,
        "gradients of the window": state.window,
    }
    return [
        StatePart(name, dtype, size)
        for name, tree in named.items()
        for dtype, size in sorted(_bytes_by_dtype(tree).items(), key=lambda item: -item[1])
    ]


def _bytes_by_dtype(tree: Any) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for dtype, x in _arrays(tree):
        sizes[dtype] += _device_bytes(x)
    return +sizes


_COMPOUND = {QuantizedKernel: "nf4", Blockwise: "8-bit"}


def _arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple(_COMPOUND))):
        for x in jax.tree.leaves(node):
            yield _COMPOUND.get(type(node)) or str(x.dtype), x


def _device_bytes(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * int(x.dtype.itemsize)
