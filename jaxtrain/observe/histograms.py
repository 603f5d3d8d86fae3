"""Histograms of a model's arrays, computed on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

BINS = 64


class Histogram(NamedTuple):
    """The finite elements of an array, counted in `BINS` bins of equal width from `low` to `high`."""

    counts: Any  # int32[BINS]
    low: Any  # float32[]
    high: Any  # float32[]
    sum: Any  # float32[]
    sum_squares: Any  # float32[]

    def edges(self) -> NDArray[np.float64]:
        """Return the bin edges, float64[BINS + 1]."""
        return np.linspace(float(self.low), float(self.high), BINS + 1)


@jax.jit
def _histograms(arrays: list[jax.Array]) -> list[Histogram]:
    return [_histogram(array.astype(np.float32).ravel()) for array in arrays]


def histograms(tree: Any) -> dict[str, Histogram]:
    """Compute the histogram of every floating-point array of a pytree.

    One program on the device; only the counts are copied to the host.

    Args:
      tree: Pytree of arrays.

    Returns:
      The histogram of each floating-point array, by its path.

    Example:
      >>> found = histograms({"w": jnp.array([0.0, 1.0, 2.0, jnp.inf])})
      >>> int(found["w"].counts.sum()), float(found["w"].high), found["w"].counts[[0, 32, 63]].tolist()
      (3, 2.0, [1, 1, 1])
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, np.floating)
    ]
    return dict(
        zip([name for name, _ in leaves], jax.device_get(_histograms([leaf for _, leaf in leaves])), strict=True)
    )


def _histogram(x: jax.Array) -> Histogram:
    is_finite = jnp.isfinite(x)
    low, high = (
        reduce(jnp.where(is_finite, x, filler))
        for reduce, filler in ((jnp.min, np.float32(np.inf)), (jnp.max, np.float32(-np.inf)))
    )
    width = jnp.where(high > low, (high - low) / np.float32(BINS), np.float32(1))
    bins = jnp.where(is_finite, jnp.clip((x - low) / width, 0, BINS - 1), 0).astype(np.int32)
    counts = jnp.zeros(BINS, np.int32).at[bins].add(is_finite.astype(np.int32))
    finite = jnp.where(is_finite, x, np.float32(0))
    return Histogram(counts, low, high, finite.sum(), (finite**2).sum())
