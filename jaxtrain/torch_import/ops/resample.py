"""Interpolation of images, as products with matrices that depend on sizes only."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import.ops.pool import along
from jaxtrain.torch_import.ops.registry import op

Scales = Sequence[float] | None


def _sizes(x: jax.Array, size: Sequence[int] | None, scales: Scales) -> list[int]:
    if size is not None:
        return list(size)
    assert scales is not None
    return [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]


def _places(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return where each output element lies in the input."""
    if align_corners:
        return np.arange(out) * ((size - 1) / max(out - 1, 1))
    ratio = size / out if scale is None else 1 / scale
    return (np.arange(out) + 0.5) * ratio - 0.5


def _linear(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return the matrix [size, out] of a linear interpolation."""
    at = np.clip(_places(size, out, align_corners, scale), 0, None)
    low = np.minimum(at.astype(int), size - 1)
    high, weight = np.minimum(low + 1, size - 1), at - low
    matrix = np.zeros((size, out))
    matrix[low, np.arange(out)] += 1 - weight
    matrix[high, np.arange(out)] += weight
    return matrix


def _cubic(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return the matrix [size, out] of a cubic interpolation with a = -0.75 (Keys 1981)."""
    a, at = -0.75, _places(size, out, align_corners, scale)
    first = np.floor(at).astype(int)
    matrix = np.zeros((size, out))
    for offset in range(-1, 3):
        distance = np.abs(at - first - offset)
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weight = np.where(distance <= 1, near, far)
        np.add.at(matrix, (np.clip(first + offset, 0, size - 1), np.arange(out)), weight)
    return matrix


def _interpolation(matrix: Callable[[int, int, bool, float | None], np.ndarray]) -> Callable[..., jax.Array]:
    def interpolate(
        x: jax.Array, size: Sequence[int] | None, align_corners: bool, scale_factors: Scales = None
    ) -> jax.Array:
        """Interpolate the axes after the second."""
        sizes = _sizes(x, size, scale_factors)
        for i, out in enumerate(sizes):
            scale = None if scale_factors is None else scale_factors[i]
            x = along(x, matrix(x.shape[2 + i], out, align_corners, scale), 2 + i)
        return x

    return interpolate


for _name in ("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec"):
    op(_name)(_interpolation(_linear))
op("upsample_bicubic2d.vec")(_interpolation(_cubic))


@op("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def nearest(x: jax.Array, size: Sequence[int] | None, scale_factors: Scales = None) -> jax.Array:
    """Repeat the nearest element."""
    for i, out in enumerate(_sizes(x, size, scale_factors)):
        ratio = x.shape[2 + i] / out if scale_factors is None else 1 / scale_factors[i]
        at = np.minimum(np.floor(np.arange(out) * np.float32(ratio)).astype(int), x.shape[2 + i] - 1)
        x = jnp.take(x, jnp.asarray(at), 2 + i)
    return x
