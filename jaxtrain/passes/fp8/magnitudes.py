"""The numbers that products in 8 bits round: their operands, multiplied by their scales."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.scales import scale_of, tiles


def scaled_rows(fp8: Fp8, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return rows [..., n], scaled for a product that sums over features, before they are rounded to a format.

    With the scaling "block" zeros fill the last tile.

    Example:
      >>> scaled_rows(Fp8("row"), jnp.array([[1.0, 2.0], [0.5, 0.25]]), jnp.float8_e4m3fn).tolist()
      [[224.0, 448.0], [448.0, 224.0]]
    """
    if fp8.scaling == "block":
        x = tiles(x, x.ndim - 1)
    return _scaled(fp8, x, dtype, tuple(range(x.ndim)) if fp8.is_per_tensor else (x.ndim - 1,))


def scaled_kernel(fp8: Fp8, kernel: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a kernel [K, N], scaled for a product that sums over K, before it is rounded to a format.

    With the scaling "block" zeros fill the last blocks.
    """
    if fp8.scaling == "block":
        return _scaled(fp8, tiles(tiles(kernel, 1), 0), dtype, (1, 3))
    return _scaled(fp8, kernel, dtype, (0,) if fp8.scaling == "row" else (0, 1))


def _scaled(fp8: Fp8, x: jax.Array, dtype: jax.typing.DTypeLike, axes: tuple[int, ...]) -> jax.Array:
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(np.float32)
    return x.astype(np.float32) * scale_of(amax, dtype, power_of_two=fp8.power_of_two_scales)
