"""Reductions by index: scatter_reduce, index_reduce, bags of embeddings, histograms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.passes import widen
from jaxtrain.torch_import.ops.table import op, with_gradient

_SUM, _MEAN, _MAX = range(3)


@op("scatter_reduce.two")
def scatter_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """Reduce values that an index assigns to the same element. Equal extrema share the gradient, as in PyTorch."""
    shape, x, index = x.shape, jnp.atleast_1d(x), jnp.atleast_1d(index)
    src = jnp.atleast_1d(src)[tuple(slice(n) for n in index.shape)]
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    grid[dim] = index
    at = tuple(jnp.broadcast_to(i, index.shape) for i in grid)
    written = jnp.zeros(x.shape, bool).at[at].set(True)
    kept = jnp.ones(x.shape, bool) if include_self else ~written
    return jnp.where(kept | written, _reduced(x, at, src, reduce, kept), x).reshape(shape)


def _reduced(x: jax.Array, at: tuple[jax.Array, ...], src: jax.Array, reduce: str, kept: jax.Array) -> jax.Array:
    """Reduce the elements of x that are kept with the values that belong to them."""
    if reduce == "prod":
        return _product(jnp.where(kept, x, 1), at, src)
    if reduce in ("sum", "mean"):
        total = jnp.where(kept, x, 0).at[at].add(src)
        count = kept.astype(x.dtype).at[at].add(1)
        return total if reduce == "sum" else total / jnp.maximum(count, 1)
    start = jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, x.dtype)
    places = lax.stop_gradient(jnp.where(kept, x, start)).at[at]
    best = places.max(lax.stop_gradient(src)) if reduce == "amax" else places.min(lax.stop_gradient(src))
    ours, theirs = kept & (x == best), src == best[at]
    # PyTorch counts an element that is not included, too.
    count = (x == best).astype(x.dtype).at[at].add(theirs.astype(x.dtype))
    shared = jnp.where(ours, x - lax.stop_gradient(x), 0).at[at].add(jnp.where(theirs, src - lax.stop_gradient(src), 0))
    return with_gradient(best, shared / jnp.maximum(count, 1))


@jax.custom_vjp
def _product(x: jax.Array, at: tuple[jax.Array, ...], src: jax.Array) -> jax.Array:
    return x.at[at].mul(src)


def _product_forward(x: jax.Array, at: Any, src: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, at, src), (x, at, src)


def _product_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    """The product of all other factors: without division by a factor that is 0."""
    x, at, src = saved
    zeros = (x == 0).astype(int).at[at].add((src == 0).astype(int))
    rest = jnp.where(x == 0, 1, x).at[at].mul(jnp.where(src == 0, 1, src))

    def others(factor: jax.Array, zeros: jax.Array, rest: jax.Array) -> jax.Array:
        zero = factor == 0
        return jnp.where(zeros > zero.astype(int), 0, rest / jnp.where(zero, 1, factor))

    return grad * others(x, zeros, rest), None, grad[at] * others(src, zeros[at], rest[at])


_product.defvjp(_product_forward, _product_backward)


@op("index_reduce.default")
def index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """Reduce slices that an index assigns to the same slice."""
    source = source.reshape([index.size if i == dim % max(x.ndim, 1) else n for i, n in enumerate(x.shape or (1,))])
    along = index.reshape([-1 if i == dim % source.ndim else 1 for i in range(source.ndim)])
    return scatter_reduce(x, dim, jnp.broadcast_to(along, source.shape), source, reduce, include_self=include_self)


@op("put.default")
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """Write, or add, values at places of the flattened array."""
    places = x.ravel().at[index.ravel()]
    values = source.ravel()
    return (places.add(values) if accumulate else places.set(values, unique_indices=True)).reshape(x.shape)


@op("bincount.default", library="jaxtrain")
def bincount(x: jax.Array, weights: jax.Array | None, minlength: int) -> jax.Array:
    """Numbers of the values below `minlength`, or sums of their weights, without gradient."""
    if weights is None:
        return jnp.zeros(minlength, int).at[x].add(1)
    dtype = weights.dtype if weights.dtype == jnp.float32 else jnp.float64
    return jnp.zeros(minlength, jax.dtypes.canonicalize_dtype(dtype)).at[x].add(lax.stop_gradient(weights))


@op("histc.default")
def histc(x: jax.Array, bins: int = 100, min: float = 0, max: float = 0) -> jax.Array:
    """Numbers of elements in bins of equal width, without gradient."""
    x = lax.stop_gradient(x).ravel()
    low, high = (jnp.min(x), jnp.max(x)) if min == max and x.size else (jnp.asarray(min), jnp.asarray(max))
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.clip(((x - low) / (high - low) * bins).astype(int), 0, bins - 1)
    return jnp.zeros(bins, x.dtype).at[place].add(((x >= low) & (x <= high)).astype(x.dtype))


@op("_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    """Sums, means or maxima of bags of rows; nobody reads the other results but PyTorch's own backward pass."""
    del sparse
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq=True")
    bags = offsets.shape[0] - include_last_offset
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0]), side="right") - 1
    # The rows are widened and not the table, which may be large.
    rows, kept = widen(weight[indices]), indices != (padding_idx if padding_idx >= 0 else -1)
    count = jnp.zeros(bags, rows.dtype).at[bag].add(kept.astype(rows.dtype))[:, None]
    if mode == _MAX:
        return _largest(rows, kept, bag, bags), None, None, None
    rows = jnp.where(kept[:, None], rows if per_sample_weights is None else rows * per_sample_weights[:, None], 0)
    total = jnp.zeros((bags, weight.shape[1]), rows.dtype).at[bag].add(rows)
    return total if mode == _SUM else total / jnp.maximum(count, 1), None, None, None


def _largest(rows: jax.Array, kept: jax.Array, bag: jax.Array, bags: int) -> jax.Array:
    """Return the largest rows of bags; the first of equal elements receives the gradient."""
    values = jnp.where(kept[:, None], lax.stop_gradient(rows), -jnp.inf)
    best = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype).at[bag].max(values)
    places = jnp.where(values == best[bag], jnp.arange(len(bag))[:, None], len(bag))
    first = jnp.full(best.shape, len(bag)).at[bag].min(places)
    chosen = jnp.take_along_axis(rows, jnp.minimum(first, len(bag) - 1), 0)
    return jnp.where(jnp.isneginf(best), 0, chosen)
