"""Reading and writing by index: embedding, gather, scatter."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.torch_import.ops.shape import at_slice
from jaxtrain.torch_import.ops.table import op, ops

Index = Sequence[jax.Array | None]


def _at(indices: Index) -> tuple[Any, ...]:
    """Return PyTorch's index list as an index."""
    return tuple(slice(None) if index is None else index for index in indices)


ops(
    {
        "index.Tensor _unsafe_index.Tensor": lambda x, indices: x[_at(indices)],
        "gather.default": lambda x, dim, index, sparse_grad=False: jnp.take_along_axis(x, index, dim) if x.ndim else x,
        "take_along_dim.default": lambda x, indices, dim: jnp.take_along_axis(x, indices, dim),
        "index_select.default": lambda x, dim, index: jnp.take(x, index, dim) if x.ndim else x,
        "take.default": lambda x, index: x.ravel()[index],
    }
)


@op("nonzero_static.default")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """Places of the first elements that are not 0, int [size, ndim]."""
    # The newest JAX's `jnp.nonzero` is no plain program.
    found = (x != 0).ravel()
    first = jnp.argsort(~found, stable=True)[:size]
    first = jnp.pad(first, (0, size - len(first)))
    places = jnp.stack(jnp.unravel_index(first, x.shape), -1) if x.ndim else jnp.zeros((size, 0), first.dtype)
    return jnp.where((jnp.arange(size) < found.sum())[:, None], places, fill_value)


@op("embedding.default")
def embedding(
    weight: jax.Array, indices: jax.Array, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> jax.Array:
    """Rows of a table. The row at `padding_idx` receives no gradient; others, with `scale_grad`, the mean of theirs."""
    del sparse
    rows = weight[indices]
    if scale_grad:
        times = jnp.zeros(len(weight), rows.dtype).at[indices].add(1)[indices]
        constant = lax.stop_gradient(rows)
        rows = constant + (rows - constant) / times[..., None]
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@op("index_put.default", "_unsafe_index_put.default")
def index_put(x: jax.Array, indices: Index, values: jax.Array, accumulate: bool = False) -> jax.Array:
    """Write, or add, values at an index."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.dtype in (jnp.bool_, jnp.uint8) for _, index in given):
        if len(given) > 1:
            raise NotImplementedError("a mask beside other indices; write by torch.where")
        return _masked_put(x, *given[0], values, accumulate)
    at = x.at[_at(indices)]
    return at.add(values) if accumulate else _set(at, values)


def _masked_put(x: jax.Array, axis: int, mask: jax.Array, values: jax.Array, accumulate: bool) -> jax.Array:
    """Write values where a mask of the axes from one on is true: one for all places, or one after another.

    Where PyTorch raises an error, as there are not as many values as places, everything is NaN.
    """
    mask, rank = mask.astype(bool), x.ndim - mask.ndim + 1
    values = values.reshape(*(1,) * (rank - values.ndim), *values.shape).astype(x.dtype)
    count = values.shape[axis]
    if count == 1:
        values = values.reshape(*values.shape[:axis], *(1,) * mask.ndim, *values.shape[axis + 1 :])
    else:
        order = jnp.clip(jnp.cumsum(mask.ravel()) - 1, 0, count - 1)
        values = jnp.take(values, order, axis)
        values = values.reshape(*values.shape[:axis], *mask.shape, *values.shape[axis + 1 :])
    written = jnp.where(
        mask.reshape(*mask.shape, *(1,) * (x.ndim - axis - mask.ndim)), x + values if accumulate else values, x
    )
    if count == 1:
        return written
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise NotImplementedError("several integers where a mask is true; use masked_scatter")
    return jnp.where(mask.sum() == count, written, jnp.nan)


def _set(at: Any, values: Any) -> jax.Array:
    """Write values. At an index that occurs twice, both values receive the gradient, as in PyTorch."""
    written: jax.Array = at.set(values, unique_indices=True)
    return written


def _scatter_at(x: jax.Array, dim: int, index: jax.Array) -> Any:
    """Return x at the places that a scatter with this index writes."""
    x, index = (x.reshape(1), index.reshape(-1)) if x.ndim == 0 else (x, index)
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    grid[dim] = index
    return x.at[tuple(grid)]


def _like_index(src: jax.Array, index: jax.Array) -> jax.Array:
    return src[tuple(slice(n) for n in index.shape)].reshape(index.shape or (1,))


@op("scatter.src")
def scatter(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    """Write values along an axis."""
    return _set(_scatter_at(x, dim, index), _like_index(src, index)).reshape(x.shape)


@op("scatter.value")
def scatter_value(x: jax.Array, dim: int, index: jax.Array, value: float) -> jax.Array:
    """Write one number along an axis."""
    return _set(_scatter_at(x, dim, index), value).reshape(x.shape)


@op("scatter_add.default")
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    """Add values along an axis."""
    return _scatter_at(x, dim, index).add(_like_index(src, index)).reshape(x.shape)


@op("index_add.default")
def index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, alpha: float = 1) -> jax.Array:
    """Add slices at indices of an axis."""
    return _rows(x, dim, index).add((alpha * source).reshape(_rows_shape(x, dim, index))).reshape(x.shape)


@op("index_copy.default")
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    """Write slices at indices of an axis."""
    return _set(_rows(x, dim, index), source.reshape(_rows_shape(x, dim, index))).reshape(x.shape)


@op("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    """Write one number at indices of an axis."""
    if x.ndim == 0:
        return jnp.where(index.size > 0, value, x)
    filled = jnp.zeros(x.shape[dim], bool).at[index].set(True)
    return jnp.where(filled.reshape(*(-1 if i == dim % x.ndim else 1 for i in range(x.ndim))), value, x)


def _rows(x: jax.Array, dim: int, index: jax.Array) -> Any:
    """Return the slices of an axis at an index, to be written; a scalar has one."""
    x = x.reshape(1) if x.ndim == 0 else x
    return x.at[(slice(None),) * (dim % x.ndim) + (index.reshape(-1),)]


def _rows_shape(x: jax.Array, dim: int, index: jax.Array) -> tuple[int, ...]:
    shape = [*(x.shape or (1,))]
    shape[dim] = index.size
    return tuple(shape)


@op("slice_scatter.default")
def slice_scatter(
    x: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    """Write a range of an axis."""
    return x.at[at_slice(x, dim, start, end, step)].set(src)


@op("select_scatter.default")
def select_scatter(x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    """Write one slice of an axis."""
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(src)


@op("masked_scatter.default")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """Write the values of source, one after another, where the mask is true."""
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.cumsum(mask.ravel()) - 1
    return jnp.where(mask, source.ravel()[order].reshape(x.shape), x)


@op("diagonal_scatter.default")
def diagonal_scatter(x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Write the diagonal of two axes."""
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    at = jnp.arange(src.shape[-1])
    written = last.at[..., at + max(-offset, 0), at + max(offset, 0)].set(src)
    return jnp.moveaxis(written, (-2, -1), (dim1, dim2))
