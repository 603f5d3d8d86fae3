"""Dynamic 8-bit data types: 256 values between −1 and 1 that fill seven decades, each with twice the values below it.

The values are those of `bitsandbytes.functional.create_dynamic_map`, to the bit. A value is rounded to the nearest of
them by arithmetic on its decade and one look-up, and not by a search of the table.

References:
  Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016, section 2.1.
  Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, sections 1.3 and 2.2.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

_DECADES = 7


@dataclass(frozen=True)
class DynamicMap:
    """A dynamic data type of 8 bits.

    Attributes:
      signed: Whether half of the values are negative. 0 and 1 are values in either case, and −1 is not.
    """

    signed: bool

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The values in increasing order, float32 [256]."""
        positive = [0.0, 1.0]
        for decade in range(_DECADES):
            bounds = _linspace(2 ** (decade + (not self.signed)) + 1)
            means = (bounds[:-1] + bounds[1:]) / np.float32(2)
            positive += (np.float32(10.0 ** (decade - 6)) * means).tolist()
        negative = [-x for x in positive if 0 < x < 1] if self.signed else []
        return np.array(sorted(negative + positive), np.float32)

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 127 if self.signed else 0

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return the values of codes.

        Args:
          codes: uint8 [...].

        Returns:
          float32 [...].
        """
        return jnp.asarray(self.values).at[codes.astype(np.int32)].get(mode="promise_in_bounds")

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the codes of the nearest values; of two that are equally near, the lower one.

        Args:
          x: float32 [...], from −1 to 1.

        Returns:
          uint8 [...].

        Example:
          >>> signed = DynamicMap(signed=True)
          >>> codes = signed.encode(jnp.array([-1.0, 0.0, 0.3, 1.0]))
          >>> codes.tolist()
          [0, 127, 205, 255]
          >>> [round(value, 4) for value in signed.decode(codes).tolist()]
          [-0.993, 0.0, 0.3039, 1.0]
        """
        size = jnp.abs(x)
        # In decade d the values are `finest` · 2ᵈ equal steps apart: `steps` is linear in x, and its whole numbers are
        # the bounds between neighbours, except the bound to the decade below, which is at 0.2.
        finest = 1 if self.signed else 2
        scale, first = jnp.full_like(x, 1e6 / 0.9 * finest), jnp.full_like(x, finest)
        for d in range(1, _DECADES):
            above = size >= np.float32(10.0 ** (d - _DECADES))
            scale = jnp.where(above, np.float32(10.0 ** (6 - d) / 0.9 * finest * 2**d), scale)
            first = jnp.where(above, np.float32(finest * 2**d), first)
        steps = size * scale - first * np.float32(1 / 9)
        bound = (first + jnp.round(steps)).astype(np.int32)
        highest = 128 if self.signed else 256
        bound = jnp.clip(bound, finest, highest)
        if not self.signed:
            return (bound - 2 + _is_above(x, _last_below(self.values), bound - 2)).astype(np.uint8)
        negative = x < 0
        magnitude = (
            bound - 1 + _is_above(size, _signed_last_below(self.values), bound - 1 + jnp.where(negative, 128, 0))
        )
        # There is no −1.
        return (127 + jnp.where(negative, -jnp.minimum(magnitude, 127), magnitude)).astype(np.uint8)


SIGNED = DynamicMap(signed=True)
UNSIGNED = DynamicMap(signed=False)


def _is_above(x: jax.Array, bounds: np.ndarray, i: jax.Array) -> jax.Array:
    """Return whether x > bounds[i], int32."""
    return (x > jnp.asarray(bounds).at[i].get(mode="promise_in_bounds")).astype(np.int32)


def _linspace(n: int) -> np.ndarray:
    """Return `torch.linspace(0.1, 1, n)` to the bit: steps from the nearer end, each value rounded once."""
    start = np.float32(0.1)
    i, step = np.arange(n), float((np.float32(1) - start) / np.float32(n - 1))
    return np.where(i < n // 2, float(start) + i * step, 1 - (n - 1 - i) * step).astype(np.float32)


def _last_below(values: np.ndarray) -> np.ndarray:
    """Return the largest x whose nearest value is `values[i]` and not `values[i + 1]`, distances rounded to float32."""
    low, high = values[:-1], values[1:]
    last = (low + high) / np.float32(2)
    for _ in range(4):
        above = np.nextafter(last, high)
        last = np.where(above - low <= high - above, above, last)
    for _ in range(4):
        last = np.where(last - low <= high - last, last, np.nextafter(last, low))
    return last


def _signed_last_below(values: np.ndarray) -> np.ndarray:
    """Return the largest magnitudes that round to code 127 + i, and after these 128 the ones to code 127 − i."""
    bounds = _last_below(values)
    # A negative x is nearest to the upper value if it is above the bound: the magnitude below which it is.
    negative = np.nextafter(-bounds[:127][::-1], np.float32(0))
    return np.concatenate([bounds[127:], negative, np.ones(1, np.float32)])
