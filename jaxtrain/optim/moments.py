"""Moving averages of gradients, their bias corrections, and hyperparameters that may be schedules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax


def zeros(params: Any) -> Any:
    """Return a pytree of zeros like `params`."""
    return jax.tree.map(jnp.zeros_like, params)


def value_at(value: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """Return a hyperparameter at update number `count`: the value of a schedule, or the number itself."""
    return value(count) if callable(value) else value


def average(decay: Any, old: Any, new: Any) -> Any:
    """Return decay · old + (1 − decay) · new per leaf, with 1 − decay in double if `decay` is a number.

    >>> average(0.75, [jnp.array([4.0])], [jnp.array([8.0])])[0].tolist()
    [5.0]
    """

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.asarray(decay, a.dtype) * a + jnp.asarray(1 - decay, a.dtype) * b.astype(a.dtype)

    return jax.tree.map(leaf, old, new)


def squares(tree: Any) -> Any:
    """Return the square of every leaf."""
    return jax.tree.map(lambda g: g * g, tree)


def one_minus_power(b: Any, t: jax.Array) -> jax.Array:
    """Return 1 − bᵗ to the full precision of t's dtype.

    >>> f"{one_minus_power(0.999, jnp.float32(1)):.9f}"      # one minus a float32 power is 0.000999987
    '0.001000000'
    """
    if isinstance(b, int | float):
        return -jnp.expm1(t * math.log(b)) if b else jnp.ones_like(t)
    return -jnp.expm1(t * jnp.log(b.astype(t.dtype)))
