"""Convolutions, with the channels of the images on the second or the last axis."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.torch_import.ops.table import op


def per_axis(value: int | Sequence[int], rank: int) -> list[int]:
    """Return one number per spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


@op("conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    channels_last: bool = False,
) -> jax.Array:
    """Convolve [N, C, ...], [C, ...] or, with `channels_last`, [N, ..., C] with [O, C / groups, ...]."""
    rank = weight.ndim - 2
    dilation = per_axis(dilation, rank)
    y = lax.conv_general_dilated(
        x if x.ndim == rank + 2 else x[None],
        weight,
        per_axis(stride, rank),
        _widths(padding, weight.shape[2:], dilation),
        rhs_dilation=dilation,
        dimension_numbers=_axes(rank, channels_last),
        feature_group_count=groups,
    )
    return _finished(y, bias, x.ndim == rank + 2, channels_last)


def _widths(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        return [(0, 0)] * len(kernel)
    return [(p, p) for p in per_axis(padding, len(kernel))]


def _axes(rank: int, channels_last: bool) -> lax.ConvDimensionNumbers:
    """Return the axes of rows, channels and space in images, of outputs, inputs and space in a kernel."""
    standard = tuple(range(rank + 2))
    images = (0, rank + 1, *range(1, rank + 1)) if channels_last else standard
    return lax.ConvDimensionNumbers(images, standard, images)


def _finished(y: jax.Array, bias: jax.Array | None, batched: bool, channels_last: bool) -> jax.Array:
    if bias is not None:
        y = y + (bias if channels_last else bias.reshape(-1, *(1,) * (y.ndim - 2)))
    return y if batched else y[0]


@op("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    channels_last: bool = False,
) -> jax.Array:
    """Convolve transposed: the gradient of a convolution, with a weight [C, O / groups, ...]."""
    rank = weight.ndim - 2
    strides, dilations = per_axis(stride, rank), per_axis(dilation, rank)
    reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    extra = zip(reach, per_axis(padding, rank), per_axis(output_padding, rank), strict=True)
    flipped = jnp.flip(weight, range(2, 2 + rank)).reshape(groups, -1, *weight.shape[1:])
    y = lax.conv_general_dilated(
        x if x.ndim == rank + 2 else x[None],
        jnp.swapaxes(flipped, 1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:]),
        [1] * rank,
        [(n - p, n - p + o) for n, p, o in extra],
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=_axes(rank, channels_last),
        feature_group_count=groups,
    )
    return _finished(y, bias, x.ndim == rank + 2, channels_last)


@op("convolution.default")
def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """The general convolution that the others decompose to."""
    if transposed:
        return conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(x, weight, bias, stride, padding, dilation, groups)
