"""Sorting and selection by rank."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.torch_import.ops.table import of_vectors, op, with_gradient


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


@op("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    boundaries: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """Where values belong in sorted vectors: in one, or in one for each row of values."""
    del out_int32
    boundaries = boundaries if sorter is None else jnp.take_along_axis(boundaries, sorter, -1)
    chosen = "right" if right or side == "right" else "left"
    find = functools.partial(jnp.searchsorted, side=chosen)
    return jnp.vectorize(find, signature="(n),(m)->(m)")(boundaries, x) if boundaries.ndim > 1 else find(boundaries, x)


@op("bucketize.Tensor")
def bucketize(x: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    """The bucket of each value."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@op("median.dim")
@of_vectors
def median(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The lower median along an axis and its index."""
    return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@op("nanmedian.dim")
@of_vectors
def nanmedian(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The lower median of what is not NaN along an axis and its index."""
    order = jnp.argsort(x, dim, stable=True)
    count = (~jnp.isnan(x)).sum(dim, keepdims=True)
    index = jnp.take_along_axis(order, jnp.maximum(count - 1, 0) // 2, dim)
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@op("nanmedian.default")
def nanmedian_of_all(x: jax.Array) -> jax.Array:
    """The lower median of all elements that are not NaN; equal elements share the gradient."""
    value = jax.lax.stop_gradient(nanmedian(x.ravel(), 0)[0])
    return with_gradient(value, jnp.mean(x, where=x == value))


@op("mode.default")
@of_vectors
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The smallest of the most frequent values along an axis and the index of its last occurrence."""
    order = jnp.moveaxis(jnp.argsort(x, dim, stable=True), dim, -1)
    values = jnp.take_along_axis(jnp.moveaxis(x, dim, -1), order, -1)
    changes = values[..., 1:] != values[..., :-1]
    edge = jnp.ones((*values.shape[:-1], 1), bool)
    positions = jnp.arange(values.shape[-1])
    starts = jax.lax.cummax(jnp.where(jnp.concatenate([edge, changes], -1), positions, 0), axis=values.ndim - 1)
    lengths = jnp.where(jnp.concatenate([changes, edge], -1), positions - starts + 1, 0)
    last = jnp.argmax(lengths, -1, keepdims=True)
    index = jnp.moveaxis(jnp.take_along_axis(order, last, -1), -1, dim)
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _running(x: jax.Array, dim: int, larger: bool) -> tuple[jax.Array, jax.Array]:
    """Return running extrema and the index of the last of equal ones; after a NaN all are NaN."""

    def later(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wins = b[0] >= a[0] if larger else b[0] <= a[0]
        wins = wins | jnp.isnan(b[0]) if jnp.issubdtype(x.dtype, jnp.floating) else wins
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
