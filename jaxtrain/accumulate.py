"""An accumulation window: gradients of k micro-batches summed, each with its weight, by `optax.MultiSteps`.

MultiSteps does the summing only. It is opened anew for every window and never asked to emit: its own reset is a
multiplication, which one inf turns into NaN for good, its own update would run the optimizer k times and average
micro-batches of different weights as equals. So the optimizer's arithmetic runs once a window, outside.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError


class Window(NamedTuple):
    """`sums` of weighted gradients and their `weight` [], in float32; in float64 for float64 parameters."""

    sums: optax.MultiStepsState
    weight: jax.Array


def open_window(params: Any) -> Window:
    """An empty window for gradients shaped like `params`."""
    return Window(_summing(params).init(params), jnp.zeros([], _sum_dtype(params)))


def add(window: Window, grads: Any, weight: jax.Array, k: int) -> Window:
    """The window with one more of its k micro-batches: the gradient of its mean loss over k, and that mean's weight.

    >>> params = jnp.zeros(1)
    >>> window = add(open_window(params), jnp.array([3.0 / 2]), jnp.float32(1), k=2)
    >>> window = add(window, jnp.array([1.0 / 2]), jnp.float32(3), k=2)
    >>> float(mean_gradient(window)[0])      # (3·1 + 1·3) / (1 + 3)
    1.5
    """
    weighted = jax.tree.map(lambda g: g * (weight * k).astype(g.dtype), grads)
    # optax multiplies by booleans, which JAX's strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        _, sums = _summing(grads).update(weighted, window.sums)
    return Window(sums, window.weight + weight.astype(window.weight.dtype))


def mean_gradient(window: Window) -> Any:
    """The gradient of the window's mean loss: the sum of the weighted gradients over the sum of the weights."""
    weight = nonzero(window.weight)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), window.sums.acc_grads)


def split(batch: Any, k: int) -> Any:
    """`batch` [B, …] as k micro-batches [k, B/k, …], in order.

    Raises `UserError` where k does not divide B.
    """

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
