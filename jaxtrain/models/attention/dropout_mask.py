"""Blocks of the mask that `jax.random.bernoulli` draws for all attention weights, each computed by itself.

JAX's generator is counter-based (Threefry, Salmon et al. 2011): the bits of an element depend on the key and on the
element's index only. A block of the mask can therefore be drawn without the rest, and drawn again in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

Array = jax.Array | np.ndarray


def is_counter_based(rng: jax.Array) -> bool:
    """Return whether the bits of a key's arrays depend on the key and on an element's index only."""
    typed = jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key)
    name = str(jax.random.key_impl(rng)) if typed else str(_setting("jax_default_prng_impl"))
    return name in ("fry", "threefry2x32") and bool(_setting("jax_threefry_partitionable"))


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def counters(rng: jax.Array, rows: int) -> jax.Array:
    """Return the operand uint32 [B, 3] of attention for a key: its two words and the number of each row."""
    words = jnp.broadcast_to(_words(rng), (rows, 2))
    return jnp.concatenate([words, jnp.arange(rows, dtype=np.uint32)[:, None]], axis=1)


def _words(rng: jax.Array) -> jax.Array:
    return jax.random.key_data(rng) if jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng


def kept(
    rng: jax.Array | Sequence[jax.Array],
    rate: float,
    shape: tuple[int, int, int],
    heads: Array,
    queries: Array,
    keys: Array,
    threefry: Callable[..., Sequence[jax.Array]] = threefry2x32_p.bind,
) -> jax.Array:
    """Return elements of `jax.random.bernoulli(key, 1 - rate, (B, N, T, S))` of one row.

    Args:
      rng: The counters of the row, uint32 [3].
      rate: Dropout rate.
      shape: N, T and S.
      heads: Their indices along N; the three arrays of indices are broadcast together.
      queries: Their indices along T.
      keys: Their indices along S.
      threefry: Threefry-2x32 of two words of a key and two of a counter.

    Returns:
      bool, of the shape of the indices.

    Example:
      >>> key, index = jax.random.key(0), np.arange(4, dtype=np.uint32)
      >>> mask = jax.random.bernoulli(key, 0.5, (3, 2, 4, 4))
      >>> block = kept(counters(key, 3)[2], 0.5, (2, 4, 4), np.uint32(1), index[1:3, None], index[None, 1:])
      >>> bool((block == mask[2, 1, 1:3, 1:]).all())
      True
    """
    n, t, s = shape
    line = (rng[2] * np.uint32(n) + jnp.asarray(heads, np.uint32)) * np.uint32(t) + jnp.asarray(queries, np.uint32)
    high, low = _product(line, s)
    column = jnp.asarray(keys, np.uint32)
    last = low + column
    high, last = jnp.broadcast_arrays(high + (last < column).astype(np.uint32), last)
    bits = threefry(*(jnp.broadcast_to(rng[i], last.shape) for i in range(2)), high, last)
    # As `jax.random.uniform`: the mantissa is random, in the widest float.
    if (dtype := jax.dtypes.canonicalize_dtype(np.float64)) == np.float64:
        random = (bits[0].astype(np.uint64) << np.uint64(32)) | bits[1].astype(np.uint64)
        uniform = (random >> np.uint64(12)).astype(dtype) * 2.0**-52
    else:
        uniform = ((bits[0] ^ bits[1]) >> np.uint32(9)).astype(dtype) * 2.0**-23
    return uniform < dtype.type(1.0 - rate)


def kept_of_rows(rate: float, rng: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Return the whole mask, bool [B, N, T, S]; the arguments are those of `kept`, for the counters of all rows."""
    heads, queries, keys = np.ix_(*(np.arange(n, dtype=np.uint32) for n in shape))
    return jax.vmap(lambda row: kept(row, rate, shape, heads, queries, keys))(rng)


def _product(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and the low word of x · y, uint32 each."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    y_high, y_low = np.uint32(y >> 16), np.uint32(y & 0xFFFF)
    x_high, x_low = x >> half, x & low
    first, second = x_high * y_low, x_low * y_high
    carry = ((x_low * y_low) >> half) + (first & low) + (second & low)
    return x_high * y_high + (first >> half) + (second >> half) + (carry >> half), x * np.uint32(y)
