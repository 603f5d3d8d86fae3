"""Interpolation of images, as products with matrices that depend on sizes only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import.ops.network.pool import along
from jaxtrain.torch_import.ops.table import op

Scales = Sequence[float] | None


def _sizes(x: jax.Array, size: Sequence[int] | None, scales: Scales) -> list[int]:
    if size is not None:
        return list(size)
    assert scales is not None
    return [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]


def _ratio(size: int, out: int, align_corners: bool, scale: float | None) -> float:
    """Return the distance of two output elements in the input."""
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return size / out if scale is None else 1 / scale


def _places(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return where each output element lies in the input."""
    ratio = _ratio(size, out, align_corners, scale)
    return np.arange(out) * ratio if align_corners else (np.arange(out) + 0.5) * ratio - 0.5


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
    at = _places(size, out, align_corners, scale)
    first = np.floor(at).astype(int)
    matrix = np.zeros((size, out))
    for offset in range(-1, 3):
        weight = _cubic_kernel(-0.75)(at - first - offset)
        np.add.at(matrix, (np.clip(first + offset, 0, size - 1), np.arange(out)), weight)
    return matrix


def _cubic_kernel(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return the kernel of a cubic interpolation (Keys 1981)."""

    def weight(x: np.ndarray) -> np.ndarray:
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x**2 + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))

    return weight


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _smoothed(
    kernel: Callable[[np.ndarray], np.ndarray], width: int
) -> Callable[[int, int, bool, float | None], np.ndarray]:
    """Return the matrix of an interpolation whose kernel is stretched where the output is smaller.

    References:
      `_compute_indices_weights_aa` in PyTorch's `aten/src/ATen/native/cpu/UpSampleKernel.cpp`.
    """

    def matrix(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
        ratio = _ratio(size, out, align_corners, scale)
        stretch = max(ratio, 1.0)
        support = width / 2 * stretch
        weights = np.zeros((size, out))
        for i in range(out):
            center = ratio * (i + 0.5)
            first, last = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), size)
            values = kernel((np.arange(first, last) - center + 0.5) / stretch)
            weights[first:last, i] = values / values.sum()
        return weights

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
op("_upsample_bilinear2d_aa.vec")(_interpolation(_smoothed(_triangle, 2)))
op("_upsample_bicubic2d_aa.vec")(_interpolation(_smoothed(_cubic_kernel(-0.5), 4)))


@op("_upsample_bilinear2d_aa.default")
def bilinear_smoothed(
    x: jax.Array, size: Sequence[int], align_corners: bool, scales_h: float | None = None, scales_w: float | None = None
) -> jax.Array:
    """Interpolate the axes after the second without aliasing."""
    for i, scale in enumerate((scales_h, scales_w)):
        x = along(x, _smoothed(_triangle, 2)(x.shape[2 + i], size[i], align_corners, scale), 2 + i)
    return x


@op("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def nearest(x: jax.Array, size: Sequence[int] | None, scale_factors: Scales = None) -> jax.Array:
    """Repeat the element at or before each place."""
    return _repeated(x, _sizes(x, size, scale_factors), scale_factors, exact=False)


@op("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec")
def nearest_exact(x: jax.Array, size: Sequence[int] | None, scale_factors: Scales = None) -> jax.Array:
    """Repeat the element nearest to each place."""
    return _repeated(x, _sizes(x, size, scale_factors), scale_factors, exact=True)


def _repeated(x: jax.Array, sizes: Sequence[int], scales: Scales, *, exact: bool) -> jax.Array:
    for i, out in enumerate(sizes):
        at = nearest_places(x.shape[2 + i], out, None if scales is None else scales[i], x.dtype, exact)
        x = jnp.take(x, jnp.asarray(at), 2 + i)
    return x


def nearest_places(size: int, out: int, scale: float | None, dtype: Any, exact: bool) -> np.ndarray:
    """Return the input element of each output element.

    The dtype of the arithmetic decides between two elements: PyTorch computes in float32, of float64 images in float64.

    References:
      `HelperInterpNearest` in PyTorch's `aten/src/ATen/native/cpu/UpSampleKernel.cpp`.
    """
    real: Any = np.float64 if dtype == np.float64 else np.float32
    ratio = real(size) / real(out) if scale is None else real(1 / scale)
    places = np.arange(out, dtype=real)
    if exact:
        # Rounded once, as by a fused multiply-add: float64 holds the product of two float32 numbers.
        places = np.maximum((np.float64(ratio) * (places + 0.5) - 0.5).astype(real), 0) + real(0.5)
    else:
        places = ratio * places
    return np.minimum(np.floor(places.astype(np.float32)).astype(int), size - 1)
