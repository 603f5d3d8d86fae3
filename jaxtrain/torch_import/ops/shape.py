"""Operations on shapes: views, joins, splits, padding. None of them computes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.torch_import.ops.table import op, ops

_END = 2**62
"""Ends of slices beyond this mean the end of the axis."""

ops(
    {
        "view.default reshape.default _unsafe_view.default view_copy.default": lambda x, size: jnp.reshape(x, size),
        "view_as.default reshape_as.default": lambda x, other: jnp.reshape(x, other.shape),
        "unsqueeze.default unsqueeze_copy.default": lambda x, dim: jnp.expand_dims(x, dim),
        "transpose.int swapaxes.default transpose_copy.int": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
        "t.default numpy_T.default t_copy.default": lambda x: x.T,
        "mT.default": lambda x: jnp.swapaxes(x, -1, -2),
        "permute.default permute_copy.default": lambda x, dims: jnp.transpose(x, dims),
        "movedim.intlist": jnp.moveaxis,
        "movedim.int": jnp.moveaxis,
        "flip.default": jnp.flip,
        "rot90.default": lambda x, k=1, dims=(0, 1): jnp.rot90(x, k, dims),
        "stack.default": lambda tensors, dim=0: jnp.stack(tensors, dim),
        "select.int select_copy.int": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
        "unbind.int unbind_copy.int": lambda x, dim=0: [
            lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])
        ],
        "repeat.default": jnp.tile,
        "tile.default": jnp.tile,
        "repeat_interleave.self_int": lambda x, repeats, dim=None, output_size=None: jnp.repeat(x, repeats, dim),
        "tril.default": jnp.tril,
        "triu.default": jnp.triu,
        "clone.default contiguous.default alias.default lift_fresh.default": lambda x, **_: x,
        "lift_fresh_copy.default alias_copy.default": lambda x, **_: x,
        "detach.default detach_copy.default": lax.stop_gradient,
        "narrow_copy.default": lambda x, dim, start, length: lax.slice_in_dim(x, start, start + length, axis=dim),
        "expand_as.default": lambda x, other: jnp.broadcast_to(x, other.shape),
        "view_as_complex.default": lambda x: lax.complex(x[..., 0], x[..., 1]),
        "view_as_real.default": lambda x: jnp.stack([x.real, x.imag], -1),
        "real.default": jnp.real,
        "imag.default": jnp.imag,
        "conj.default _conj.default conj_physical.default _conj_physical.default resolve_conj.default": jnp.conj,
    }
)


@op("expand.default", "broadcast_to.default", "expand_copy.default")
def expand(x: jax.Array, size: Sequence[int], implicit: bool = False) -> jax.Array:
    """Broadcast; -1 keeps the size of an axis."""
    del implicit
    added = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - added] if n == -1 else n for i, n in enumerate(size)])


@op("squeeze.default", "squeeze.dim", "squeeze.dims", "squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims")
def squeeze(x: jax.Array, dim: int | Sequence[int] | None = None) -> jax.Array:
    """Remove axes of size 1."""
    if dim is None:
        return jnp.squeeze(x)
    dims = (dim,) if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(i for i in dims if x.ndim and x.shape[i] == 1))


@op("flatten.using_ints")
def flatten(x: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    """Merge axes."""
    if x.ndim == 0:
        return x.reshape(1)
    return x.reshape(*x.shape[: start_dim % x.ndim], -1, *x.shape[end_dim % x.ndim + 1 :])


@op("unflatten.int")
def unflatten(x: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    """Split an axis."""
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@op("cat.default", "concat.default", "concatenate.default")
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Concatenate; an empty vector fits anything, as in PyTorch."""
    dtype = jnp.result_type(*tensors)
    kept = [x.astype(dtype) for x in tensors if x.shape != (0,)] or [tensors[0]]
    return jnp.concatenate(kept, dim)


@op("slice.Tensor", "slice_copy.Tensor")
def slice_(x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> jax.Array:
    """Take a range of an axis."""
    return x[at_slice(x, dim, start, end, step)]


def at_slice(x: jax.Array, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    """Return the index of a range of an axis."""
    return (slice(None),) * (dim % x.ndim) + (slice(start, None if end is None or end > _END else end, step),)


@op("split.Tensor", "split_with_sizes.default", "split.sizes", "split_copy.Tensor", "split_with_sizes_copy.default")
def split(x: jax.Array, split_size: int | Sequence[int], dim: int = 0) -> list[jax.Array]:
    """Split into parts of one size, or of given sizes."""
    length = x.shape[dim]
    if isinstance(split_size, int):
        starts = range(0, max(length, 1), max(split_size, 1))
        sizes = [min(split_size, length - start) for start in starts]
    else:
        sizes = list(split_size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [lax.slice_in_dim(x, end - size, end, axis=dim) for size, end in zip(sizes, ends, strict=True)]


@op("chunk.default")
def chunk(x: jax.Array, chunks: int, dim: int = 0) -> list[jax.Array]:
    """Split into at most `chunks` parts of one size."""
    return split(x, -(-x.shape[dim] // chunks), dim)


@op("roll.default")
def roll(x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    """Shift cyclically; without `dims`, along the flattened array."""
    if not dims:
        return jnp.roll(x.ravel(), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@op("pad.default")
def pad(x: jax.Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> jax.Array:
    """Pad the last axes, or cut them where an amount is negative."""
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    if mode == "constant":
        return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(low, high, 0) for low, high in widths])
    added = [(max(low, 0), max(high, 0)) for low, high in widths]
    cut = [(min(low, 0), min(high, 0), 0) for low, high in widths]
    zero = jnp.zeros((), x.dtype)
    if mode == "circular":
        return jnp.pad(lax.pad(x, zero, cut), added, mode="wrap")
    return lax.pad(jnp.pad(x, added, mode={"reflect": "reflect", "replicate": "edge"}[mode]), zero, cut)


@op("constant_pad_nd.default")
def constant_pad_nd(x: jax.Array, pad_: Sequence[int], value: float = 0) -> jax.Array:
    """Pad with a number."""
    return pad(x, pad_, "constant", value)


for _rank in (1, 2, 3):
    op(f"reflection_pad{_rank}d.default")(lambda x, padding: pad(x, padding, "reflect"))
    op(f"replication_pad{_rank}d.default")(lambda x, padding: pad(x, padding, "replicate"))


@op("pixel_shuffle.default")
def pixel_shuffle(x: jax.Array, upscale_factor: int) -> jax.Array:
    """Move channels into blocks of pixels."""
    r, (*lead, c, h, w) = upscale_factor, x.shape
    blocks = x.reshape(*lead, c // r**2, r, r, h, w)
    return jnp.moveaxis(blocks, (-4, -3), (-3, -1)).reshape(*lead, c // r**2, h * r, w * r)


@op("pixel_unshuffle.default")
def pixel_unshuffle(x: jax.Array, downscale_factor: int) -> jax.Array:
    """Move blocks of pixels into channels."""
    r, (*lead, c, h, w) = downscale_factor, x.shape
    blocks = x.reshape(*lead, c, h // r, r, w // r, r)
    return jnp.moveaxis(blocks, (-3, -1), (-4, -3)).reshape(*lead, c * r * r, h // r, w // r)


@op("unfold.default", "unfold_copy.default")
def unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Windows of an axis, on a new last axis."""
    if x.ndim == 0:
        return x.reshape(1)
    starts = jnp.arange(0, x.shape[dimension] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), dimension)
    return jnp.moveaxis(windows, dimension % x.ndim + 1, -1)


@op("diagonal.default", "diagonal_copy.default")
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """The diagonal of two axes, on a new last axis."""
    return jnp.diagonal(x, offset, dim1, dim2)


@op("diag_embed.default")
def diag_embed(x: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    """Matrices with the last axis on their diagonal."""
    n = x.shape[-1] + abs(offset)
    rows = jnp.arange(x.shape[-1]) + max(-offset, 0)
    square = jnp.zeros((*x.shape[:-1], n, n), x.dtype).at[..., rows, rows + offset].set(x)
    return jnp.moveaxis(square, (-2, -1), (dim1, dim2))


@op("as_strided.default", "as_strided_copy.default")
def as_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """A view of a contiguous tensor by strides."""
    return x.ravel()[_strided(size, stride, storage_offset)]


def _strided(size: Sequence[int], stride: Sequence[int], offset: int | None) -> np.ndarray:
    """Return the places of a view in the flattened tensor."""
    places = np.full((), offset or 0)
    for n, step in zip(size, stride, strict=True):
        places = np.add.outer(places, np.arange(n) * step)
    return places


@op("meshgrid.default", "meshgrid.indexing")
def meshgrid(tensors: Sequence[jax.Array], indexing: str = "ij") -> list[jax.Array]:
    """Coordinates of a grid."""
    return list(jnp.meshgrid(*(x.ravel() for x in tensors), indexing=indexing))


@op("repeat_interleave.Tensor")
def repeat_interleave(repeats: jax.Array, output_size: int) -> jax.Array:
    """The place of each element that is repeated as often as a tensor says, in a known number of elements."""
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


@op("item.default", "_local_scalar_dense.default")
def item(x: jax.Array) -> Any:
    """A tensor of one element as a number, without gradient."""
    return lax.stop_gradient(x.reshape(()))
