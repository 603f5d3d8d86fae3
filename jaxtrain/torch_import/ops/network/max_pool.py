"""Maxima of windows with their places."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import.ops.network.convolution import per_axis
from jaxtrain.torch_import.ops.network.pool import Sizes, windows
from jaxtrain.torch_import.ops.table import op


def _largest(x: jax.Array, places: Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Return the first largest element of each window and its index in the flattened spatial axes.

    Args:
      x: [..., spatial axes].
      places: For each spatial axis the positions [windows, elements]; those outside of the axis do not count.

    Returns:
      A tuple (values, indices) of [..., windows of each axis].
    """
    rank = len(places)
    sizes, lead = x.shape[-rank:], x.shape[:-rank]
    index, inside = np.zeros((), int), np.ones((), bool)
    for i, (size, at) in enumerate(zip(sizes, places, strict=True)):
        # The windows of all axes come first, then their elements.
        shape = [1] * (2 * rank)
        shape[i], shape[rank + i] = at.shape
        index = index * size + np.clip(at, 0, size - 1).reshape(shape)
        inside = inside & ((at >= 0) & (at < size)).reshape(shape)
    counts = tuple(at.shape[0] for at in places)
    index, inside = index.reshape(*counts, -1), np.broadcast_to(inside, index.shape).reshape(*counts, -1)
    elements = x.reshape(*lead, -1)[..., index]
    best = jnp.argmax(jnp.where(inside, elements, -jnp.inf), -1, keepdims=True)
    chosen = jnp.take_along_axis(jnp.broadcast_to(index, elements.shape), best, -1)[..., 0]
    return jnp.take_along_axis(elements, best, -1)[..., 0], chosen


def _with_indices(rank: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def max_pool_with_indices(
        x: jax.Array,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """The largest element of each window and its place."""
        kernel, strides, pads, dilations = windows(x, kernel_size, stride, padding, dilation, ceil_mode, rank)
        places = []
        for size, k, s, (low, high), d in zip(x.shape[-rank:], kernel, strides, pads, dilations, strict=True):
            count = (size + low + high - d * (k - 1) - 1) // s + 1
            places.append(np.arange(count)[:, None] * s - low + np.arange(k) * d)
        return _largest(x, places)

    return max_pool_with_indices


def _adaptive(rank: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def adaptive_max_pool(x: jax.Array, output_size: Sizes) -> tuple[jax.Array, jax.Array]:
        """The largest elements of as many windows as the output has elements, and their places."""
        places = []
        for size, out in zip(x.shape[-rank:], per_axis(output_size, rank), strict=True):
            first = np.arange(out) * size // max(out, 1)
            last = -(-(np.arange(out) + 1) * size // max(out, 1))
            at = first[:, None] + np.arange(max((last - first).max(initial=0), 1))
            places.append(np.where(at < last[:, None], at, -1))
        return _largest(x, places)

    return adaptive_max_pool


for _rank in (1, 2, 3):
    op(f"max_pool{_rank}d_with_indices.default")(_with_indices(_rank))
    op(f"adaptive_max_pool{_rank}d.default")(_adaptive(_rank))
