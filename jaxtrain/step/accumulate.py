"""An accumulation window: gradients of k micro-batches summed, each with its weight, by `optax.MultiSteps`.

MultiSteps does the summing only. It is opened anew for every window and never asked to emit: its own reset is a
multiplication, which one inf turns into NaN for good, its own update would run the optimizer k times and average
micro-batches of different weights as equals. So the optimizer's arithmetic runs once a window, outside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.step.nonfinite import Nonfinite, earlier, locate, nowhere
from jaxtrain.step.objective import Loss

Schedule = Callable[[jax.Array], Any]
"""From the number of applied updates, int32[], to the micro-batches of the next window."""


class Window(NamedTuple):
    """`sums` of weighted gradients and the summed `loss`, in float32; in float64 for float64 parameters. `nonfinite`:
    where the first inf or NaN came in."""

    sums: optax.MultiStepsState
    loss: Loss
    nonfinite: Nonfinite


def open_window(params: Any) -> Window:
    """An empty window for gradients shaped like `params`."""
    dtype = _sum_dtype(params)
    return Window(_summing(params).init(params), Loss(jnp.zeros([], dtype), jnp.zeros([], dtype)), nowhere())


def add(window: Window, grads: Any, loss: Loss, k: jax.Array | int) -> Window:
    """The window with one more of its k micro-batches: the gradient of its mean loss over k, and its summed loss.

    >>> params = jnp.zeros(1)
    >>> window = add(open_window(params), jnp.array([3.0 / 2]), Loss(jnp.float32(5), jnp.float32(1)), k=2)
    >>> window = add(window, jnp.array([1.0 / 2]), Loss(jnp.float32(7), jnp.float32(3)), k=2)
    >>> float(mean_gradient(window)[0])      # (3·1 + 1·3) / (1 + 3)
    1.5
    """
    nonfinite = earlier(window.nonfinite, locate(grads, count(window)))
    factor = loss.weight * jnp.asarray(k, loss.weight.dtype)
    weighted = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
    # optax multiplies by booleans, which JAX's strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        _, sums = _summing(grads).update(weighted, window.sums)
    return Window(sums, Loss(*(a + b.astype(a.dtype) for a, b in zip(window.loss, loss, strict=True))), nonfinite)


def count(window: Window) -> jax.Array:
    """int32[]: the micro-batches in the window."""
    return jnp.asarray(window.sums.mini_step)


def mean_gradient(window: Window) -> Any:
    """The gradient of the window's mean loss: the sum of the weighted gradients over the sum of the weights."""
    weight = nonzero(window.loss.weight)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), window.sums.acc_grads)


def split(batch: Any, k: int) -> Any:
    """`batch` [B, …] as k micro-batches [k, B/k, …], in order; as it is where k is 1.

    Raises `UserError` where k does not divide B.
    """
    if k == 1:
        return batch

    def leaf(x: Any) -> Any:
        if np.ndim(x) == 0 or x.shape[0] % k:
            rows = "no rows" if np.ndim(x) == 0 else f"{x.shape[0]} rows"
            raise UserError(f"a batch of {rows} is not divisible into {k} micro-batches: make it a multiple of {k}")
        return x.reshape(k, x.shape[0] // k, *x.shape[1:])

    return jax.tree.map(leaf, batch)


def nonzero(weight: jax.Array) -> jax.Array:
    """`weight`, or 1 where it is 0: an all-masked batch has gradient 0, not 0/0."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))


def _summing(tree: Any) -> optax.MultiSteps:
    never = np.iinfo(np.int32).max
    return optax.MultiSteps(optax.identity(), never, use_grad_mean=False, accumulator_dtype=_sum_dtype(tree))


def _sum_dtype(tree: Any) -> Any:
    return np.float64 if any(x.dtype == np.float64 for x in jax.tree.leaves(tree)) else np.float32
