"""Histograms of the magnitudes of an array, exact and in one pass: how many elements a lower precision would lose.

The bits of a float32 without its sign are an integer that grows with the magnitude, so that a class of numbers (those
that float16 rounds to zero, those between two powers of 2) is an interval of integers. The elements from each bound on
are counted by one reduction with an accumulator for each bound: XLA computes it in one kernel, which reads the array
once, without scatters and atomics. It does so for up to 40 bounds; for more it writes the comparisons to memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST, HIGHEST, WIDTH = -40, 16, 2
"""Exponents of the histogram's first and last bound, and octaves in a bin."""
BASE = 4096
"""Counts are pairs of numbers to this base, so that sums of them are exact in float32."""
_MOST = 2**31  # elements that an int32 counts
_NAN = 0x7F800001
_MAGNITUDE = 0x7FFFFFFF


class Limits(NamedTuple):
    """The magnitudes at which rounding to a dtype changes its kind of result, as bits of float32.

    Attributes:
      nonzero: The first that is not rounded to zero.
      normal: The first that is not rounded to zero or to a subnormal number.
      overflow: The first that is rounded to inf, or to NaN in a dtype without inf.
    """

    nonzero: int
    normal: int
    overflow: int


@functools.cache
def rounding_limits(dtype: Any) -> Limits:
    """Return where rounding to a dtype begins to give nonzero, normal and non-finite numbers.

    Args:
      dtype: A floating-point dtype of at most 16 bits.

    Example:
      >>> limits = rounding_limits(np.float16)  # half of 2^-24, and half an ulp below 2^-14 and above 65504
      >>> np.array(limits, np.int32).view(np.float32).tolist() == [2**-25 * (1 + 2**-23), 2**-14 - 2**-25, 65520.0]
      True
    """
    tiny = float(jnp.finfo(dtype).smallest_normal)

    def first(holds: Callable[[Any], Any]) -> int:
        low, high = 0, 0x7F800000
        while low < high:
            middle = (low + high) // 2
            with np.errstate(over="ignore"):
                rounded = np.array(middle, np.int32).view(np.float32).astype(dtype).astype(np.float64)
            low, high = (low, middle) if holds(rounded) else (middle + 1, high)
        return low

    return Limits(first(lambda x: x != 0), first(lambda x: not x < tiny), first(lambda x: not np.isfinite(x)))


@functools.cache
def bounds(dtype: Any) -> tuple[int, ...]:
    """Return the bounds that are counted, ascending: 0, the smallest number, the dtype's limits, powers of 2, NaN."""
    exponents = range(LOWEST, HIGHEST + 1, WIDTH)
    powers = [int(np.float32(2.0**e).view(np.int32)) for e in exponents]
    return tuple(sorted([0, 1, *rounding_limits(dtype), *powers, _NAN]))


def count_from(x: jax.Array, dtype: Any) -> jax.Array:
    """Count the elements of an array whose magnitudes reach each of the bounds of a dtype.

    Args:
      x: Array of float32, or of a dtype that float32 contains.
      dtype: The dtype whose limits are counted, as for `rounding_limits`.

    Returns:
      float32[2, bounds]: the counts as high · 4096 + low, both integers.

    Example:
      >>> _, low = count_from(jnp.array([0.0, 1e-8, 1e-6, 1.0, 1e6, jnp.nan]), np.float16)
      >>> at = bounds(np.float16).index
      >>> [int(low[at(bound)]) for bound in (0, 1, *rounding_limits(np.float16))]
      [6, 5, 4, 3, 2]
    """
    magnitudes = lax.bitcast_convert_type(x.astype(np.float32), np.int32) & np.int32(_MAGNITUDE)
    indicators = tuple((magnitudes >= np.int32(bound)).astype(np.int32) for bound in bounds(dtype))
    if x.size < _MOST:
        counts = jnp.stack(_sums(indicators, range(x.ndim)))
        high, low = counts // BASE, counts % BASE
    else:
        rows = jnp.stack(_sums(indicators, range(1, x.ndim)))
        high, low = (rows // BASE).sum(1), (rows % BASE).sum(1)
        high, low = high + low // BASE, low % BASE
    return jnp.stack([high, low]).astype(np.float32)


def _sums(arrays: Sequence[jax.Array], axes: Sequence[int]) -> Sequence[jax.Array]:
    """Sum integer arrays in one loop over their elements."""
    zeros = tuple(np.int32(0) for _ in arrays)

    def add(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    sums: Sequence[jax.Array] = lax.reduce(tuple(arrays), zeros, add, tuple(axes))
    return sums
