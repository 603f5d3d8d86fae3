"""The accumulation window: the weighted gradients of k micro-batches, summed by `optax.MultiSteps`.

MultiSteps only adds. It is initialized for every window and never emits an update: its own reset multiplies by zero,
which turns one inf into NaN for good, and its own update would run the optimizer k times and average micro-batches of
different weights as equals. The optimizer therefore runs once per window, outside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name
from jaxtrain.step.checks.batch import require_equal_rows
from jaxtrain.step.nonfinite import Nonfinite, earliest, locate_nonfinite, none_nonfinite
from jaxtrain.step.objective import Loss
from jaxtrain.step.probes import NO_PROBES, Probes, observed_together

WindowSchedule = Callable[[jax.Array], Any]
"""From the number of applied updates, int32[], to the number of micro-batches of the next window."""


class Window(NamedTuple):
    """The sums over the micro-batches of a window, in float32; in float64 for float64 parameters.

    Attributes:
      sums: Sum of the weighted gradients.
      loss: Sum of the losses and weights.
      nonfinite: Location of the first inf or NaN.
      observed: The maximum of what the passes have observed.
    """

    sums: optax.MultiStepsState
    loss: Loss
    nonfinite: Nonfinite
    observed: Probes = NO_PROBES


def open_window(params: Any, probes: Probes = NO_PROBES) -> Window:
    """Return an empty window for gradients shaped like `params`, by these probes too."""
    dtype = sum_dtype(params)
    loss = Loss(jnp.zeros([], dtype), jnp.zeros([], dtype))
    return Window(_accumulator(params).init(params), loss, none_nonfinite(), probes)


def add_micro_batch(window: Window, grads: Any, loss: Loss, k: jax.Array | int, observed: Probes = NO_PROBES) -> Window:
    """Add one of a window's k micro-batches.

    Args:
      window: The window so far.
      grads: Gradient of the micro-batch's mean loss over k.
      loss: The micro-batch's summed loss and weight.
      k: Number of micro-batches of the window.
      observed: What its passes have observed.

    Returns:
      The window with the micro-batch added.

    Example:
      >>> params = jnp.zeros(1)
      >>> window = open_window(params)
      >>> window = add_micro_batch(window, jnp.array([3.0 / 2]), Loss(jnp.float32(5), jnp.float32(1)), k=2)
      >>> window = add_micro_batch(window, jnp.array([1.0 / 2]), Loss(jnp.float32(7), jnp.float32(3)), k=2)
      >>> float(mean_gradient(window)[0])      # (3·1 + 1·3) / (1 + 3)
      1.5
    """
    nonfinite = earliest(window.nonfinite, locate_nonfinite(grads, micro_batch_count(window)))
    factor = gradient_factor(loss.weight, k)
    weighted = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
    # optax multiplies by booleans, which JAX's strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        _, sums = _accumulator(grads).update(weighted, window.sums)
    return Window(sums, add_loss(window.loss, loss), nonfinite, observed_together(window.observed, observed))


def gradient_factor(weight: jax.Array, k: jax.Array | int) -> jax.Array:
    """Return the factor in the window's sums of the gradient of a micro-batch's mean loss over k."""
    return weight * jnp.asarray(k, weight.dtype)


def add_loss(total: Loss, loss: Loss) -> Loss:
    """Add a micro-batch's summed loss and weight to a window's."""
    return Loss(*(a + b.astype(a.dtype) for a, b in zip(total, loss, strict=True)))


def micro_batch_count(window: Window) -> jax.Array:
    """Return the number of micro-batches in the window, int32[]."""
    return jnp.asarray(window.sums.mini_step)


def mean_gradient(window: Window) -> Any:
    """Return the gradient of the window's mean loss: the sum of weighted gradients over the sum of weights."""
    return mean_of_sums(window.sums.acc_grads, window.loss.weight)


def mean_of_sums(sums: Any, weight: jax.Array) -> Any:
    """Return sums of weighted gradients over the sum of weights."""
    weight = nonzero_weight(weight)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), sums)


def split_batch(batch: Any, k: int) -> Any:
    """Split a batch [B, …] into k micro-batches [k, B/k, …], in order; return it unchanged if k is 1.

    Raises:
      UserError: k does not divide B, or an array of the batch is a scalar or has other rows than another.
    """
    if k == 1:
        return batch

    def split(path: Any, x: Any) -> Any:
        name = path_name(path) or "batch"
        if isinstance(x, list):
            raise UserError(f"{name} is a list of {len(x)} numbers, not an array: pass numpy.asarray(...) of it")
        if np.ndim(x) == 0:
            raise UserError(
                f"{name} is a scalar, which cannot be split into {k} micro-batches: "
                "give every array of the batch a leading axis of rows, or use accumulate=1"
            )
        if x.shape[0] % k:
            raise UserError(f"batch_size {x.shape[0]} is not divisible by accumulate {k}: use a multiple of {k}")
        return x.reshape(k, x.shape[0] // k, *x.shape[1:])

    def is_list_of_numbers(x: Any) -> bool:
        return isinstance(x, list) and bool(x) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))

    require_equal_rows(batch)
    return jax.tree_util.tree_map_with_path(split, batch, is_leaf=is_list_of_numbers)


def scaled_mean(loss: Loss, k: jax.Array | int, scale: jax.Array | float) -> jax.Array:
    """Return what is differentiated: a micro-batch's mean loss over k, multiplied by the loss scale."""
    # The mean over k, as PyTorch's loops divide it, so that fp16 overflows and underflows at the same scales.
    mean = loss.total / (nonzero_weight(loss.weight) * jnp.asarray(k, loss.weight.dtype))
    return mean * jnp.asarray(scale, mean.dtype)


def nonzero_weight(weight: jax.Array) -> jax.Array:
    """Return `weight`, or 1 where it is 0: a fully masked batch has gradient 0, not 0/0."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))


def _accumulator(tree: Any) -> optax.MultiSteps:
    never = np.iinfo(np.int32).max
    return optax.MultiSteps(optax.identity(), never, use_grad_mean=False, accumulator_dtype=sum_dtype(tree))


def sum_dtype(tree: Any) -> Any:
    """Return the dtype of gradient sums: float32, or float64 for float64 parameters."""
    return np.float64 if any(x.dtype == np.float64 for x in jax.tree.leaves(tree)) else np.float32
