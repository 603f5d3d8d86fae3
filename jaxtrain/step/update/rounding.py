"""How an updated parameter is rounded to its dtype: to nearest, stochastically, or with Kahan compensation.

bfloat16 has 8 significant bits. An update below half a unit in the last place of its parameter is lost to nearest
rounding, whatever the number of updates. Stochastic rounding applies it with the probability that makes the expectation
exact; Kahan compensation stores what was lost and adds it to the next update.

References:
  Zamirai et al. 2020, Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.threefry import threefry2x32

_BLOCK = 2**32
"""Number of elements that one word of a counter numbers."""


def init_compensation(rounding: str, params: Any) -> Any:
    """Return the compensation of parameters before their first update; None unless `rounding` is "kahan"."""
    return jax.tree.map(jnp.zeros_like, params) if rounding == "kahan" else None


def apply_updates(rounding: str, params: Any, updates: Any, compensation: Any, key: jax.Array) -> tuple[Any, Any]:
    """Add updates to parameters.

    Args:
      rounding: "nearest", "stochastic" or "kahan"; it concerns bfloat16 parameters, others are rounded to nearest.
      params: Pytree of parameters.
      updates: Pytree of updates, float32 or float64.
      compensation: Pytree of what was added too much by the updates before; None unless `rounding` is "kahan".
      key: Key of the random bits of this update.

    Returns:
      A tuple (params, compensation), in the dtypes of `params`.

    Example:
      >>> w, lost = jnp.ones(1, jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
      >>> for _ in range(8):
      ...     w, lost = apply_updates("kahan", w, jnp.full(1, 2.0**-10), lost, jax.random.key(0))
      >>> float(w[0])
      1.0078125
    """
    if rounding == "kahan":
        pairs = jax.tree.map(_compensated, params, updates, compensation)
        new, compensation = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs)
        return new, compensation
    if rounding == "nearest":
        return jax.tree.map(_to_nearest, params, updates), None
    n = len(jax.tree.leaves(params))
    numbers = jax.tree.unflatten(jax.tree.structure(params), range(n))
    bits = partial(_random_bits, jax.random.bits(key, (2,), np.uint32), leaves=n)
    return jax.tree.map(
        lambda x, update, leaf: _stochastic(x, update, bits(x.shape, leaf)), params, updates, numbers
    ), None


def _sum(param: jax.Array, update: jax.Array) -> jax.Array:
    dtype = np.promote_types(param.dtype, update.dtype)
    return param.astype(dtype) + update.astype(dtype)


def _to_nearest(param: jax.Array, update: jax.Array) -> jax.Array:
    """Return their sum, rounded once to the parameter's dtype."""
    return _sum(param, update).astype(param.dtype)


def _compensated(param: jax.Array, update: jax.Array, compensation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum in bfloat16, and what it has too much.

    Zamirai et al.'s algorithm. `kahan_sum` of optimi and `AnyPrecisionAdamW` of torchdistX compute the same, and store
    the compensation with the other sign. Numbers are float32 in between, so that the update is not rounded first.
    """
    if param.dtype != jnp.bfloat16:
        return _to_nearest(param, update), compensation
    wide = param.astype(np.float32)
    added = update.astype(np.float32) - compensation.astype(np.float32)
    # Not a conversion there and back, which XLA may leave out (`xla_allow_excess_precision`).
    total = lax.reduce_precision(wide + added, exponent_bits=8, mantissa_bits=7)
    excess = (total - wide) - added
    # inf - inf is NaN, which a parameter that is -inf on purpose would become with its next update.
    return total.astype(jnp.bfloat16), jnp.where(jnp.isfinite(total), excess, 0.0).astype(jnp.bfloat16)


def _stochastic(param: jax.Array, update: jax.Array, bits: jax.Array) -> jax.Array:
    """Return their sum, rounded to one of the two bfloat16 numbers around it with an expectation that is exact."""
    total = _sum(param, update)
    return (
        stochastic_round(total.astype(np.float32), bits) if param.dtype == jnp.bfloat16 else total.astype(param.dtype)
    )


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 up or down, by random bits.

    Args:
      x: float32.
      bits: Random numbers below 2¹⁶, uint32. Added to the 16 bits that are cut off, they carry into the others with a
        probability that is the distance to the lower number, in units of the distance between both.

    Returns:
      bfloat16. Numbers that bfloat16 has are unchanged, and so are inf and NaN. From the largest finite number on, the
      result is the nearest one, which is inf where it would be without random bits.

    Example:
      >>> x = jnp.float32(1 + 2.0**-8 + 2.0**-9)  # three quarters of the way from 1 to the next number
      >>> [float(stochastic_round(x, np.uint32(bits))) for bits in (0, 0x3FFF, 0x4000, 0xFFFF)]
      [1.0, 1.0, 1.0078125, 1.0078125]
    """
    pattern = lax.bitcast_convert_type(x, np.uint32)
    cut = lax.bitcast_convert_type((pattern + bits) & np.uint32(0xFFFF0000), np.float32)
    below_largest = (pattern & np.uint32(0x7FFFFFFF)) < np.uint32(0x7F7F0000)
    return jnp.where(below_largest, cut, x).astype(jnp.bfloat16)


def _random_bits(words: jax.Array, shape: tuple[int, ...], leaf: int, leaves: int) -> jax.Array:
    """Return random numbers below 2¹⁶ for the elements of leaf number `leaf` of `leaves`, uint32.

    They depend on the key's words, the leaf and the element's index only, so that they are the same on any mesh. Four
    neighbors share a counter: on a GPU, where a thread updates four elements, it computes Threefry once and writes no
    random bits to memory.
    """
    outer = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) <= _BLOCK)
    index = _index(shape, range(outer, len(shape)))
    high = _index(shape, range(outer)) * np.uint32(leaves) + np.uint32(leaf)
    first, second = (jnp.broadcast_to(word, shape) for word in words)
    low, top = threefry2x32(first, second, high, index >> np.uint32(2))
    chosen = jnp.where((index & np.uint32(2)) == 0, low, top)
    return (chosen >> ((index & np.uint32(1)) << np.uint32(4))) & np.uint32(0xFFFF)


def _index(shape: tuple[int, ...], axes: Sequence[int]) -> jax.Array:
    """Return each element's index in the order of `axes`, uint32, without an array of them all."""
    index, stride = jnp.zeros(shape, np.uint32), 1
    for axis in reversed(axes):
        index += lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(stride)
        stride *= shape[axis]
    return index
