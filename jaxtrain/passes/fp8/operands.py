"""The operands of products in 8 bits: rows and kernels, quantized along the axis that a product sums over.

With the scaling "block" an operand has a first axis of tiles, as `scaled_product` takes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.scales import E4M3, E5M2, TILE, Quantized, quantize, scaled, tiles

Split = Callable[[jax.Array], jax.Array]
"""Splits the first axis of an array into groups of rows: [groups, rows, …]."""


def gradient_format(fp8: Fp8) -> Any:
    """Return the format of gradients: that of torchao's recipes "tensorwise" and "rowwise", and of its blocks."""
    return E5M2 if fp8.is_per_tensor else E4M3


def by_given_scale(x: jax.Array, dtype: Any, scale: jax.Array) -> Quantized:
    """Quantize an array with a scale that does not follow from it; an inf becomes NaN."""
    # TransformerEngine's conversions saturate inf too, which hides it.
    return scaled(x, dtype, scale.reshape((1,) * x.ndim), hides_inf=False)


def along_features(fp8: Fp8, x: jax.Array, dtype: Any) -> Quantized:
    """Quantize rows [..., n] for a product that sums over features."""
    last = x.ndim - 1
    if fp8.scaling == "block":
        tiled = quantize(tiles(x, last), dtype, (last + 1,), power_of_two=fp8.power_of_two_scales)
        return Quantized(*(jnp.moveaxis(part, last, 0) for part in tiled))
    axes = (last,) if fp8.scaling == "row" else tuple(range(x.ndim))
    return quantize(x, dtype, axes, power_of_two=fp8.power_of_two_scales)


def along_rows(fp8: Fp8, x: jax.Array, dtype: Any, split: Split | None) -> Quantized:
    """Quantize rows [..., n] for a product that sums over rows, within each group if they are split.

    Scales are those of all rows; a tile of 128 rows is within one group.
    """
    if fp8.scaling == "block":
        grouped = x.reshape(1, -1, x.shape[-1]) if split is None else split(x)
        grouped = grouped.reshape(len(grouped), -1, x.shape[-1])
        tiled = quantize(tiles(grouped, 1), dtype, (2,), power_of_two=fp8.power_of_two_scales)
        data, scale = (jnp.moveaxis(part, 1, 0) for part in tiled)
        return Quantized(data[:, 0], scale[:, 0]) if split is None else Quantized(data, scale)
    axes = tuple(range(x.ndim - 1)) if fp8.scaling == "row" else tuple(range(x.ndim))
    return in_groups(quantize(x, dtype, axes, power_of_two=fp8.power_of_two_scales), split)


def in_groups(x: Quantized, split: Split | None) -> Quantized:
    """Split the rows of a quantized array, of which all have the same scales."""
    return x if split is None else Quantized(split(x.data), x.scale[None])


def kernel_along(fp8: Fp8, kernel: jax.Array, axis: int) -> Quantized:
    """Quantize a kernel [K, N] for a product that sums over an axis of it."""
    if fp8.scaling == "block":
        return blocks_along(quantized_blocks(fp8, kernel), axis)
    axes = (axis,) if fp8.scaling == "row" else (0, 1)
    return quantize(kernel, E4M3, axes, power_of_two=fp8.power_of_two_scales)


def quantized_blocks(fp8: Fp8, kernel: jax.Array) -> Quantized:
    """Quantize the blocks of 128×128 of a kernel [K, N]. The scales are [K / 128, 1, N / 128, 1], rounded up."""
    blocks = tiles(tiles(kernel, 1), 0)  # [K / 128, 128, N / 128, 128]
    data, scale = quantize(blocks, E4M3, (1, 3), power_of_two=fp8.power_of_two_scales)
    k, _, n, _ = data.shape
    return Quantized(data.reshape(k * TILE, n * TILE)[: kernel.shape[0], : kernel.shape[1]], scale)


def blocks_along(blocks: Quantized, axis: int) -> Quantized:
    """Return tiles of a kernel's blocks; both sums, along columns and along rows, have the same numbers."""
    data, scale = tiles(tiles(blocks.data, 1), 0), blocks.scale
    k, _, n, _ = data.shape
    if axis == 0:
        return Quantized(data.reshape(k, TILE, n * TILE), jnp.repeat(scale[:, :, :, 0], TILE, 2))
    data, scale = (jnp.moveaxis(part, 2, 0) for part in (data, scale))  # [N / 128, K / 128, 128, 128]
    return Quantized(data.reshape(n, k * TILE, TILE), jnp.repeat(scale[:, :, 0], TILE, 1))
