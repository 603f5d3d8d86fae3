"""Sorting and selection by rank."""

import jax
import jax.numpy as jnp

from jaxtrain.torch_import.ops.registry import of_vectors, op


@op("sort.default", "sort.stable")
@of_vectors
def sort(
    x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sorted values and their indices, equal values in their order."""
    del stable
    index = jnp.argsort(x, dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, index, dim), index


@op("argsort.default", "argsort.stable")
def argsort(x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> jax.Array:
    """Indices that sort."""
    return sort(x, dim, descending, stable=stable)[1]


@op("topk.default")
@of_vectors
def topk(x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[jax.Array, jax.Array]:
    """The k largest or smallest values, in order, and their indices."""
    del sorted
    index = jnp.take(jnp.argsort(x, dim, descending=largest, stable=True), jnp.arange(k), dim)
    return jnp.take_along_axis(x, index, dim), index


@op("kthvalue.default")
@of_vectors
def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The k-th smallest value and its index."""
    index = jnp.take(jnp.argsort(x, dim, stable=True), jnp.array([k - 1]), dim)
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@op("searchsorted.Tensor")
def searchsorted(
    boundaries: jax.Array, x: jax.Array, *, out_int32: bool = False, right: bool = False, side: str | None = None
) -> jax.Array:
    """Where values belong in a sorted vector."""
    del out_int32
    return jnp.searchsorted(boundaries, x, side="right" if right or side == "right" else "left")


@op("bucketize.Tensor")
def bucketize(x: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    """The bucket of each value."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@op("median.dim")
@of_vectors
def median(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The lower median along an axis and its index."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _running(x: jax.Array, dim: int, larger: bool) -> tuple[jax.Array, jax.Array]:
    """Return running extrema and the index of the last of equal ones."""

    def later(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wins = b[0] >= a[0] if larger else b[0] <= a[0]
        return jnp.where(wins, b[0], a[0]), jnp.where(wins, b[1], a[1])

    positions = jax.lax.broadcasted_iota(int, x.shape, dim % x.ndim)
    _, index = jax.lax.associative_scan(later, (jax.lax.stop_gradient(x), positions), axis=dim)
    return jnp.take_along_axis(x, index, dim), index


@op("cummax.default")
@of_vectors
def cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running maxima and their indices."""
    return _running(x, dim, larger=True)


@op("cummin.default")
@of_vectors
def cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running minima and their indices."""
    return _running(x, dim, larger=False)
