"""Gradients of `clamp`, `fmax` and `fmin` since PyTorch 2.14, which equal operands share.

Until 2.13 the first of equal operands has the whole gradient (`jaxtrain.losses.subgradients`). A captured graph says
which of the two it is.

References:
  `clamp_backward`, `fmax` and `fmin` in PyTorch's `FunctionsManual.cpp` and `derivatives.yaml`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.losses import subgradients


def clamp(x: jax.Array, min: Any = None, max: Any = None) -> jax.Array:
    """Bound x below and above; at a number the gradient is 0, with an array as bound equal elements share it."""
    bounds = [bound for bound in (min, max) if isinstance(bound, jax.Array)]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return subgradients.clamp(x, min, max)
    if not bounds:
        inside = (True if min is None else x > min) & (True if max is None else x < max)
        return jnp.where(inside, x, lax.stop_gradient(subgradients.clamp(x, min, max)))
    if min is None or max is None:
        return (_larger if max is None else _smaller)(*jnp.broadcast_arrays(x, *bounds))
    return _between(*jnp.broadcast_arrays(x, min, max))


def fmax(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the larger element, or the one that is not NaN."""
    return _larger_number(*jnp.broadcast_arrays(x, y))


def fmin(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the smaller element, or the one that is not NaN."""
    return _smaller_number(*jnp.broadcast_arrays(x, y))


def _shared(value: Callable[..., jax.Array], takes_first: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a choice of two elements whose gradient equal elements share, and both have if one is NaN."""

    def jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x, y), (dx, dy) = primals, tangents
        chosen = jnp.where(takes_first(x, y), dx, dy)
        shared = jnp.where(x == y, (dx + dy) / 2, chosen)
        return choice(x, y), jnp.where(jnp.isnan(x) | jnp.isnan(y), dx + dy, shared)

    choice: Any = jax.custom_jvp(lambda x, y: value(x, y))
    choice.defjvp(jvp)
    found: Callable[..., jax.Array] = choice
    return found


_larger, _smaller = _shared(jnp.maximum, jnp.greater), _shared(jnp.minimum, jnp.less)
_larger_number, _smaller_number = _shared(jnp.fmax, jnp.greater), _shared(jnp.fmin, jnp.less)


@jax.custom_jvp
def _between(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, low), high)


@_between.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, low, high), (dx, dlow, dhigh) = primals, tangents
    out = _between(x, low, high)
    of_bound = jnp.where(x < low, dlow, jnp.where(x > high, dhigh, dx))
    at_bound = jnp.where(x == low, (dx + dlow) / 2, jnp.where(x == high, (dx + dhigh) / 2, of_bound))
    # Equal bounds share nothing: each has the gradient of the elements beyond it.
    tangent = jnp.where(low < high, at_bound, jnp.where(low == high, of_bound, dhigh))
    return out, jnp.where(jnp.isnan(out), dx, tangent)
