"""Arithmetic of schedules that stays accurate in float32 over long runs."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def dtype() -> Any:
    """Return the dtype of rates: float32, or float64 in x64 mode."""
    return jnp.result_type(float)


def to_float(t: jax.Array) -> jax.Array:
    """Convert a count to the dtype of rates."""
    return t.astype(dtype())


def ratio(part: jax.Array, whole: int) -> jax.Array:
    """Return the ratio of two counts."""
    return to_float(part) / whole


def count_reached(milestones: Sequence[int], t: jax.Array) -> jax.Array:
    """Return the number of milestones that `t` has reached, int32[]."""
    return jnp.searchsorted(jnp.array(sorted(milestones), np.int32), t, side="right").astype(np.int32)


def power_of(base: float, t: jax.Array) -> jax.Array:
    """Return baseᵗ of a count, with the logarithm in double: the error of a float32 base grows with t."""
    if base > 0:
        return jnp.exp(to_float(t) * math.log(base))
    return jnp.asarray(base, dtype()) ** to_float(t)


def half_cosine(t: jax.Array, half: int) -> jax.Array:
    """Return (1 + cos(πt/half)) / 2."""
    return cos_squared(ratio(t % (2 * half), half))


def cos_squared(x: jax.Array) -> jax.Array:
    """Return (1 + cos πx) / 2 without its cancellation near x = 1."""
    return jnp.cos(x * (math.pi / 2)) ** 2
