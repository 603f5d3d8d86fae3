"""Images sampled at the points of a grid."""

from collections.abc import Sequence
from itertools import product

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.losses import subgradients
from jaxtrain.torch_import.ops.table import op

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


@op("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(
    x: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """Sample [N, C, ...] at points [N, ..., rank] between -1 and 1, the last coordinate that of the first axis.

    References:
      `aten/src/ATen/native/GridSampler.h` and `GridSampler.cpp` in PyTorch.
    """
    sizes = x.shape[2:]
    coordinates = jnp.moveaxis(grid, -1, 0)[::-1]
    points = [_pixels(p, size, align_corners) for p, size in zip(coordinates, sizes, strict=True)]
    if interpolation_mode != _CUBIC:
        points = [_padded(p, size, padding_mode, align_corners) for p, size in zip(points, sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        return _at(x, [jnp.round(lax.stop_gradient(p)).astype(int) for p in points])
    low = [jnp.floor(lax.stop_gradient(p)) for p in points]
    fractions = [p - first for p, first in zip(points, low, strict=True)]
    offsets = range(-1, 3) if interpolation_mode == _CUBIC else range(2)
    weigh = _cubic if interpolation_mode == _CUBIC else _linear
    total = jnp.zeros((), x.dtype)
    for steps in product(offsets, repeat=len(sizes)):
        weight = jnp.ones((), x.dtype)
        for fraction, step in zip(fractions, steps, strict=True):
            weight = weight * weigh(fraction, step)
        places = [first + step for first, step in zip(low, steps, strict=True)]
        if interpolation_mode == _CUBIC:
            places = [_padded(p, size, padding_mode, align_corners) for p, size in zip(places, sizes, strict=True)]
        total = total + weight[:, None] * _at(x, [p.astype(int) for p in places])
    return total


def _pixels(x: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """Return coordinates between -1 and 1 in pixels."""
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _padded(x: jax.Array, size: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """Return the coordinates that points outside of the image count as. At the border their gradient is 0."""
    if padding_mode == _ZEROS:
        return x
    if padding_mode == _REFLECTION:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        x = _reflected(x, low, high - low) if high > low else jnp.zeros_like(x)
    return subgradients.hardtanh(x, 0.0, size - 1.0)


def _reflected(x: jax.Array, low: float, span: float) -> jax.Array:
    distance = subgradients.abs(x - low)
    flips = jnp.floor(lax.stop_gradient(distance) / span)
    extra = distance - flips * span
    return jnp.where(flips % 2 == 0, extra, span - extra) + low


def _linear(fraction: jax.Array, step: int) -> jax.Array:
    return fraction if step else 1 - fraction


def _cubic(fraction: jax.Array, step: int) -> jax.Array:
    """Return the weight of the pixel at a distance, of a cubic interpolation with a = -0.75 (Keys 1981)."""
    a = -0.75
    distance = fraction - step if step <= 0 else step - fraction
    if step in (0, 1):
        return ((a + 2) * distance - (a + 3)) * distance**2 + 1
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a


def _at(x: jax.Array, places: Sequence[jax.Array]) -> jax.Array:
    """Return the pixels [N, C, ...] at places, 0 outside of the image."""
    inside = jnp.ones((), bool)
    index = jnp.zeros((), int)
    for place, size in zip(places, x.shape[2:], strict=True):
        inside &= (place >= 0) & (place < size)
        index = index * size + jnp.clip(place, 0, size - 1)
    flat = x.reshape(*x.shape[:2], -1)
    pixels = jnp.take_along_axis(flat, index.reshape(x.shape[0], 1, -1), 2).reshape(*x.shape[:2], *index.shape[1:])
    return jnp.where(inside[:, None], pixels, 0)
