"""Pooling."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.torch_import.ops.network.convolution import per_axis
from jaxtrain.torch_import.ops.table import in_opmath, op

_FEW = 16
"""Elements of a window whose maximum is computed elementwise."""
Sizes = int | Sequence[int]


def _overhang(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return how far the last window of `ceil_mode` reaches beyond the padded input."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    windows = -(-span // stride) + 1
    # A window must start inside the input or its left padding.
    if (windows - 1) * stride >= size + padding:
        windows -= 1
    return max(0, (windows - 1) * stride - span)


def windows(
    x: jax.Array, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil_mode: bool, rank: int
) -> tuple[list[int], list[int], list[tuple[int, int]], list[int]]:
    """Return the sizes, strides, paddings and dilations of windows, for each spatial axis."""
    k, d, p = per_axis(kernel, rank), per_axis(dilation, rank), per_axis(padding, rank)
    s = per_axis(stride, rank) if stride else k
    sizes = x.shape[-rank:]
    over = [_overhang(*args) if ceil_mode else 0 for args in zip(sizes, k, s, p, d, strict=True)]
    return k, s, [(low, low + more) for low, more in zip(p, over, strict=True)], d


def _reduced(x: jax.Array, init: Any, fn: Any, k: Any, s: Any, p: Any, d: Any) -> jax.Array:
    lead = x.ndim - len(k)
    ones = (1,) * lead
    return lax.reduce_window(
        x, init, fn, (*ones, *k), (*ones, *s), [(0, 0)] * lead + list(p), window_dilation=(*ones, *d)
    )


def _of_images(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Let a function of the last axes of [N, C, ...] take [N, ..., C] with `channels_last`."""

    @functools.wraps(fn)
    def call(x: jax.Array, *args: Any, channels_last: bool = False, **kwargs: Any) -> jax.Array:
        if not channels_last:
            return fn(x, *args, **kwargs)
        y: jax.Array = jax.vmap(lambda x: fn(x, *args, **kwargs), -1, -1)(x)
        return y

    return call


def _max_pool(rank: int) -> Callable[..., jax.Array]:
    @_of_images
    def max_pool(
        x: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> jax.Array:
        """The largest element of each window; the first of equal ones receives the gradient."""
        k, s, p, d = windows(x, kernel_size, stride, padding, dilation, ceil_mode, rank)
        # XLA differentiates no windows with holes, and searches for every maximum on a CPU.
        if math.prod(k) > _FEW and all(step == 1 for step in d):
            return _reduced(x, -np.inf, lax.max, k, s, p, d)
        highest, *others = _elements(x, k, s, p, d)
        for element in others:
            highest = jnp.where((element > highest) | jnp.isnan(element), element, highest)
        return highest

    return max_pool


def _elements(x: jax.Array, k: Any, s: Any, p: Any, d: Any) -> list[jax.Array]:
    """Return the elements of all windows, by their place within it."""
    lead = x.ndim - len(k)
    padded = lax.pad(x, jnp.asarray(-np.inf, x.dtype), [(0, 0, 0)] * lead + [(low, high, 0) for low, high in p])
    sizes = zip(padded.shape[lead:], k, s, d, strict=True)
    counts = [(n - step * (size - 1) - 1) // stride + 1 for n, size, stride, step in sizes]
    parts = []
    for offset in np.ndindex(*k):
        first = [i * step for i, step in zip(offset, d, strict=True)]
        last = [at + (n - 1) * stride + 1 for at, n, stride in zip(first, counts, s, strict=True)]
        parts.append(lax.slice(padded, [0] * lead + first, [*x.shape[:lead], *last], [*[1] * lead, *s]))
    return parts


def _avg_pool(rank: int) -> Callable[..., jax.Array]:
    @in_opmath
    @_of_images
    def avg_pool(
        x: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> jax.Array:
        """The mean of each window."""
        k, s, p, d = windows(x, kernel_size, stride, padding, 1, ceil_mode, rank)
        total = _reduced(x, np.zeros((), x.dtype)[()], lax.add, k, s, p, d)
        if divisor_override:
            return total / divisor_override
        return total / _counts(x.shape[-rank:], k, s, p, per_axis(padding, rank), count_include_pad)

    return avg_pool


def _counts(sizes: Any, k: Any, s: Any, p: Any, padding: Any, include_pad: bool) -> np.ndarray:
    """Return the number of elements of each window: with its padding, but never what `ceil_mode` adds."""
    counts = np.ones(())
    for size, kernel, stride, (low, high), pad in zip(sizes, k, s, p, padding, strict=True):
        starts = np.arange(0, size + low + high - kernel + 1, stride) - low
        first, last = (-pad, size + pad) if include_pad else (0, size)
        counts = np.multiply.outer(counts, np.minimum(starts + kernel, last) - np.maximum(starts, first))
    return counts


def _adaptive_avg_pool(rank: int) -> Callable[..., jax.Array]:
    @in_opmath
    @_of_images
    def adaptive_avg_pool(x: jax.Array, output_size: Sizes) -> jax.Array:
        """Means over as many windows as the output has elements."""
        sizes = per_axis(output_size, rank)
        if all(size == 1 for size in sizes):
            return x.mean(tuple(range(-rank, 0)), keepdims=True)
        for axis, size in zip(range(x.ndim - rank, x.ndim), sizes, strict=True):
            x = along(x, _means(x.shape[axis], size), axis)
        return x

    return adaptive_avg_pool


def _means(size: int, out: int) -> np.ndarray:
    """Return the matrix [size, out] of an adaptive mean."""
    matrix = np.zeros((size, out))
    for i in range(out):
        first, last = i * size // out, -(-(i + 1) * size // out)
        matrix[first:last, i] = 1 / (last - first)
    return matrix


def along(x: jax.Array, matrix: np.ndarray, axis: int) -> jax.Array:
    """Multiply an axis of x by a matrix [axis, new axis]."""
    return jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((axis,), (0,))), -1, axis)


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_avg_pool, (1, 2, 3))
for _rank, _functions in enumerate(
    (
        (max_pool1d, avg_pool1d, adaptive_avg_pool1d),
        (max_pool2d, avg_pool2d, adaptive_avg_pool2d),
        (max_pool3d, avg_pool3d, adaptive_avg_pool3d),
    ),
    start=1,
):
    op(f"max_pool{_rank}d.default")(_functions[0])
    op(f"avg_pool{_rank}d.default")(_functions[1])
    op(f"adaptive_avg_pool{_rank}d.default", f"_adaptive_avg_pool{_rank}d.default")(_functions[2])
