"""Quantization to 8-bit floating-point numbers with scales, and products of quantized arrays.

An array `x` is represented by numbers `x * scale`, rounded. The scale is that of torchao (`float8_utils.py`): the
largest number of the format over the largest magnitude, in float32. Conversions saturate. An inf or NaN stays visible:
its scale is 0 or NaN, so that every result that depends on it is NaN.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jaxtrain.program.primitive import primitive

E4M3 = np.dtype(jnp.float8_e4m3fn)
E5M2 = np.dtype(jnp.float8_e5m2)
SCALE = "fp8_scale"
"""Name of scales, which are saved for the backward pass where the array itself is computed again."""
TILE = 128
"""Elements of a tile along the axis that is summed over, with the scaling "block"."""

_LEAST_AMAX = 1e-12  # torchao's EPS
_MANTISSA = np.uint32((1 << 23) - 1)
_BELOW_BFLOAT16 = np.uint32((1 << 16) - 1)


class Quantized(NamedTuple):
    """Numbers in 8 bits and their scales.

    Attributes:
      data: float8[…].
      scale: float32, with as many axes, each of the size of `data` or of one: the numbers stand for `data / scale`.
    """

    data: jax.Array
    scale: jax.Array


def scale_of(amax: jax.Array, dtype: Any, *, power_of_two: bool = False) -> jax.Array:
    """Return the scale of numbers with a largest magnitude.

    Args:
      amax: float32[…], the largest magnitudes.
      dtype: The format.
      power_of_two: Whether to round down to a power of two.

    Returns:
      float32[…]: 0 for inf and NaN for NaN.

    Example:
      >>> amax = jnp.array([448.0, 100.0])
      >>> scale_of(amax, E4M3).tolist(), scale_of(amax, E4M3, power_of_two=True).tolist()
      ([1.0, 4.480000019073486], [1.0, 4.0])
    """
    largest = float(jnp.finfo(dtype).max)
    # torchao divides in float64 by at least EPS. Rounded to float32, the quotient of two float32 numbers is the same.
    is_least = amax <= np.float32(_LEAST_AMAX)
    scale = jnp.where(is_least, np.float32(largest / _LEAST_AMAX), np.float32(largest) / amax)
    if not power_of_two:
        return scale
    bits = lax.bitcast_convert_type(scale, np.uint32) & ~_MANTISSA
    return jnp.where(jnp.isnan(scale), scale, lax.bitcast_convert_type(bits, np.float32))


def quantize(x: jax.Array, dtype: Any, axes: tuple[int, ...], *, power_of_two: bool = False) -> Quantized:
    """Quantize an array with one scale for all elements along some axes.

    Args:
      x: Floating-point array.
      dtype: The format.
      axes: The axes along which elements share a scale.
      power_of_two: Whether scales are powers of two.

    Example:
      >>> quantized = quantize(jnp.array([[1.0, 3.0], [0.5, 0.0]]), E4M3, (1,))
      >>> quantized.data.astype(jnp.float32).tolist(), quantized.scale.tolist()
      ([[144.0, 448.0], [448.0, 0.0]], [[149.3333282470703], [896.0]])
    """
    scale = checkpoint_name(scale_of(largest_magnitude(x, axes), dtype, power_of_two=power_of_two), SCALE)
    return scaled(x, dtype, scale)


def scaled(x: jax.Array, dtype: Any, scale: jax.Array, *, hides_inf: bool = True) -> Quantized:
    """Quantize an array with scales, with as many axes as it has."""
    return Quantized(_cast.bind(x, scale, dtype=np.dtype(dtype), hides_inf=hides_inf), scale)


def evaluate_cast(x: jax.Array, scale: jax.Array, *, dtype: Any, hides_inf: bool) -> jax.Array:
    """Multiply by scales and convert."""
    return _product(x, scale, dtype, hides_inf).astype(dtype)


def _product(x: jax.Array, scale: jax.Array, dtype: Any, hides_inf: bool) -> jax.Array:
    """Return what is converted, in float32 and in the range of the format."""
    wide = x.astype(np.float32)
    product = wide * scale
    # A selection would keep XLA:GPU from computing x in the kernel that converts it. 0 is subtracted, or NaN.
    return saturated(product if hides_inf else saturated(product, dtype) - (wide - wide), dtype)


def _cast_on_cpu(x: jax.Array, scale: jax.Array, *, dtype: Any, hides_inf: bool) -> jax.Array:
    return rounded_once(_product(x, scale, dtype, hides_inf), dtype)


def rounded_once(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert float32 numbers to 8 bits, rounded once by every compiler.

    XLA:CPU may convert by way of float16: its former emitters do in JAX 0.10.1. A number is therefore first rounded to
    odd in the precision of bfloat16, which float16 has in the range of both formats. So none becomes the middle between
    two numbers of a format, which the second rounding might round to the wrong side.

    Example:
      >>> rounded_once(jnp.array([1.0625, 1.0626]), E4M3).tolist()
      [1.0, 1.125]
    """
    bits = lax.bitcast_convert_type(x, np.uint32)
    is_between = ((bits & _BELOW_BFLOAT16) != 0).astype(np.uint32)
    odd = (bits & ~_BELOW_BFLOAT16) | (is_between << np.uint32(16))
    return lax.bitcast_convert_type(odd, np.float32).astype(dtype)


CAST = "fp8_cast"
"""Name of the primitive that multiplies by scales and converts, by which `fuse_casts` finds it.

Differentiation of a scan would divide a function whose array is the same in every step but whose scale is not.
"""


def _cast_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    evaluate = functools.partial(evaluate_cast, **params)
    _, tangent = jax.jvp(evaluate, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))
    return _cast.bind(*primals, **params), tangent


def _cast_batched(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    batched = [x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]
    return _cast.bind(*batched, **params), 0


_cast = primitive(CAST, evaluate_cast, on={"cpu": _cast_on_cpu}, jvp=_cast_jvp, batch=_cast_batched)


def largest_magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the largest magnitudes along some axes, which become 1, in float32."""
    return _AMAX(x, axes).astype(np.float32)


def fp8_amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the largest magnitudes along axes, which become 1."""
    return jnp.max(jnp.abs(x), axis=axes, keepdims=True)


def amax_of_all(x: jax.Array) -> jax.Array:
    """Return the largest magnitude of an array, in its dtype."""
    return _AMAX(x, tuple(range(x.ndim))).reshape(())


_AMAX, AMAX = jax.jit(fp8_amax, static_argnums=1), fp8_amax.__name__
"""The jitted function, and its name, by which `fuse_casts` finds it."""


def saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """Return float32 numbers, those beyond the range of a format replaced by its largest.

    Example:
      >>> saturated(jnp.array([500.0, -1e9, jnp.nan]), E4M3).tolist()
      [448.0, -448.0, nan]
    """
    largest = np.float32(jnp.finfo(dtype).max)
    return lax.clamp(-largest, x, largest)


def dequantize(x: Quantized) -> jax.Array:
    """Return the numbers that a quantized array stands for, in float32.

    Example:
      >>> dequantize(quantize(jnp.array([1.0, 2.0]), E4M3, (0,))).tolist()
      [1.0, 2.0]
    """
    return x.data.astype(np.float32) / x.scale


def tiles(x: jax.Array, axis: int) -> jax.Array:
    """Split an axis into tiles of 128 elements, the last one filled with zeros: two axes instead of one.

    Example:
      >>> tiles(jnp.ones((2, 200)), 1).shape
      (2, 2, 128)
    """
    n = x.shape[axis]
    count = -(-n // TILE)
    padding = [(0, count * TILE - n if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, padding).reshape(*x.shape[:axis], count, TILE, *x.shape[axis + 1 :])
