"""How the numbers of a model's arrays are distributed, computed where they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

BINS = 64


class Histogram(NamedTuple):
    """Of an array's finite elements: how many in each of `BINS` equal widths from `low` to `high`."""

    counts: Any  # int32 [BINS]
    low: Any  # float32
    high: Any
    sum: Any
    sum_squares: Any

    def edges(self) -> NDArray[np.float64]:
        """[BINS + 1]: the bounds of the widths."""
        return np.linspace(float(self.low), float(self.high), BINS + 1)


@jax.jit
def _histograms(arrays: list[jax.Array]) -> list[Histogram]:
    return [_histogram(array.astype(np.float32).ravel()) for array in arrays]


def histograms(tree: Any) -> dict[str, Histogram]:
    """Of every floating-point array of a pytree, by its path: one small program on the device, 64 counts come back.

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
    finite = jnp.isfinite(x)
    low, high = (
        of(jnp.where(finite, x, other)) for of, other in ((jnp.min, np.float32(np.inf)), (jnp.max, np.float32(-np.inf)))
    )
    width = jnp.where(high > low, (high - low) / np.float32(BINS), np.float32(1))
    place = jnp.where(finite, jnp.clip((x - low) / width, 0, BINS - 1), 0).astype(np.int32)
    counts = jnp.zeros(BINS, np.int32).at[place].add(finite.astype(np.int32))
    of_finite = jnp.where(finite, x, np.float32(0))
    return Histogram(counts, low, high, of_finite.sum(), (of_finite**2).sum())
