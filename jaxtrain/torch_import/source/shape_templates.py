"""How operations on shapes, indices and dtypes are written, and reductions and new arrays."""

import math
from collections.abc import Sequence
from typing import Any

from jaxtrain.torch_import.source.expressions import Expr, attribute, call, literal, method, subscript, within
from jaxtrain.torch_import.source.templates import template

_ALL = Expr(":")


@template("view.default", "reshape.default", "_unsafe_view.default")
def _reshape(x: Any, size: Sequence[int]) -> list[Expr]:
    return [x, method(x, "reshape", *_sizes(x, size)), method(x, "reshape", *size)]


def _sizes(x: Expr, size: Sequence[int]) -> list[Any]:
    """Return the sizes of a view with x's own leading sizes by their names."""
    whole = [*size]
    if -1 in whole:
        known = math.prod(n for n in whole if n != -1)
        whole[whole.index(-1)] = math.prod(x.shape) // known if known else 0
    same = 0
    while same < min(len(whole), len(x.shape)) and whole[same] == x.shape[same]:
        same += 1
    name = within(x, 10)
    if not name.isidentifier():
        return list(size)
    if same == 0:
        is_last = len(whole) == 2 and size[0] == -1 and size[-1] == x.shape[-1]
        return [-1, Expr(f"{name}.shape[-1]")] if is_last else list(size)
    lead = f"*{name}.shape[:{same}]" if same > 1 else f"{name}.shape[0]"
    rest = size[same:]
    # One size follows from the others.
    if len(rest) == 1:
        rest = [-1]
    return [Expr(lead), *rest]


@template("unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Expr:
    axis = dim % (len(x.shape) + 1)
    if axis == 0:
        return subscript(x, None)
    if axis == len(x.shape):
        return subscript(x, Expr("..."), None)
    return subscript(x, *[_ALL] * axis, None)


@template("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(x: Any, dim: Any = None) -> list[Expr]:
    return [method(x, "squeeze", *([] if dim is None else [dim])), x]


@template("transpose.int", "swapaxes.default")
def _transpose(x: Any, a: int, b: int) -> list[Expr]:
    return [method(x, "swapaxes", a, b)]


@template("t.default", "numpy_T.default")
def _t(x: Any) -> Expr:
    return attribute(x, "T")


@template("permute.default")
def _permute(x: Any, dims: Sequence[int]) -> Expr:
    return method(x, "transpose", *dims)


@template("flatten.using_ints")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> list[Expr]:
    if not x.shape:
        return []
    start, end = start_dim % len(x.shape), end_dim % len(x.shape)
    lead = [] if start == 0 else [attribute_of(x, 0)] if start == 1 else [Expr(f"*{within(x, 10)}.shape[:{start}]")]
    tail = [] if end == len(x.shape) - 1 else [Expr(f"*{within(x, 10)}.shape[{end + 1}:]")]
    return [method(x, "reshape", *lead, -1, *tail)]


def attribute_of(x: Expr, axis: int) -> Expr:
    """Return the size of an axis."""
    return subscript(attribute(x, "shape"), axis)


@template("clone.default", "contiguous.default", "alias.default", "lift_fresh.default", "lift_fresh_copy.default")
def _same(x: Any, **_: Any) -> Expr:
    return x


@template("_to_copy.default")
def _to_copy(x: Any, dtype: Any = None) -> Expr:
    return x if dtype is None or dtype == x.dtype else method(x, "astype", dtype)


@template("to.dtype", "to.dtype_layout")
def _to(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Expr:
    return _to_copy(x, dtype)


@template("to.device")
def _to_device(x: Any, _: Any, dtype: Any, *__: Any, **___: Any) -> Expr:
    return _to_copy(x, dtype)


@template("type_as.default", "to.other")
def _type_as(x: Any, other: Any, *_: Any, **__: Any) -> Expr:
    return _to_copy(x, other.dtype)


@template("expand.default", "broadcast_to.default")
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Expr:
    added = len(size) - len(x.shape)
    whole = tuple(x.shape[i - added] if n == -1 else n for i, n in enumerate(size))
    return x if whole == x.shape else call("jnp.broadcast_to", x, whole)


@template("select.int")
def _select(x: Any, dim: int, index: int) -> list[Expr]:
    axis = dim % len(x.shape)
    at = [*[_ALL] * axis, index]
    last = [Expr("..."), index] if axis == len(x.shape) - 1 and axis else at
    return [
        subscript(x, *last),
        call("jax.lax.index_in_dim", x, index, axis, keepdims=False),
    ]


@template("slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Expr:
    axis = dim % len(x.shape)
    size = x.shape[axis]
    low = "" if not start else str(start)
    high = "" if end is None or end >= size else str(end)
    if not low and not high and step == 1:
        return x
    text = f"{low}:{high}" if step == 1 else f"{low}:{high}:{step}"
    lead = [Expr("...")] if axis == len(x.shape) - 1 and axis > 1 else [_ALL] * axis
    return subscript(x, *lead, Expr(text))


@template("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Expr:
    return subscript(x, *(_ALL if index is None else index for index in indices))


@template("split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> list[Expr]:
    length = x.shape[dim]
    if length % size:
        return []
    return [call("jnp.split", x, length // size, **_axis(dim, 0, len(x.shape)))]


@template("chunk.default")
def _chunk(x: Any, chunks: int, dim: int = 0) -> list[Expr]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


def _axis(dim: int, default: int, rank: int) -> dict[str, int]:
    dim = dim - rank if dim == rank - 1 and rank > 1 else dim
    return {} if dim == default else {"axis": dim}


@template("cat.default", "concat.default")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Expr:
    kept = [x for x in tensors if x.shape != (0,)]
    return call("jnp.concatenate", _list(kept), **({} if dim == 0 else {"axis": dim}))


@template("stack.default")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Expr:
    return call("jnp.stack", _list(tensors), **({} if dim == 0 else {"axis": dim}))


def _list(items: Sequence[Any]) -> Expr:
    return Expr(f"[{', '.join(literal(x).text for x in items)}]")


def _reduction(name: str) -> Any:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Expr:
        axis = None if dim is None or dim == () else dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
        options = {"keepdims": keepdim or None, "dtype": dtype}
        return method(x, name, *([] if axis is None else [axis]), **options)

    return reduce


template("sum.default", "sum.dim_IntList")(_reduction("sum"))
template("mean.default", "mean.dim")(_reduction("mean"))
template("any.default", "any.dim", "any.dims")(_reduction("any"))
template("all.default", "all.dim", "all.dims")(_reduction("all"))
template("amax.default", "max.default")(_reduction("max"))
template("amin.default", "min.default")(_reduction("min"))
template("argmax.default")(_reduction("argmax"))
template("cumsum.default")(lambda x, dim, dtype=None: method(x, "cumsum", dim, dtype=dtype))
template("zeros.default")(lambda size, dtype=None: call("jnp.zeros", size, dtype))
template("ones.default")(lambda size, dtype=None: call("jnp.ones", size, dtype))
template("full.default")(lambda size, value, dtype=None: call("jnp.full", size, value, dtype))
template("zeros_like.default")(lambda x, dtype=None: call("jnp.zeros_like", x))
template("ones_like.default")(lambda x, dtype=None: call("jnp.ones_like", x))
template("new_zeros.default")(lambda x, size, dtype=None: call("jnp.zeros", size, dtype or x.dtype))
template("new_ones.default")(lambda x, size, dtype=None: call("jnp.ones", size, dtype or x.dtype))
template("full_like.default")(lambda x, value, dtype=None: call("jnp.full_like", x, value))
template("gather.default")(lambda x, dim, index, sparse_grad=False: call("jnp.take_along_axis", x, index, axis=dim))
template("scalar_tensor.default")(lambda value, dtype=None: call("jnp.asarray", value, dtype))


@template("arange.default", "arange.start", "arange.start_step")
def _arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> list[Expr]:
    given = [start] if end is None else [start, end] if step == 1 else [start, end, step]
    return [
        call("jnp.arange", *given),
        call("jnp.arange", *given, dtype=dtype),
        call("jnp.asarray", call("np.arange", *given), *([] if dtype is None else [dtype])),
    ]


@template("slice_scatter.default")
def _slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Expr:
    axis, low, high = dim % len(x.shape), start or "", "" if end is None or end >= x.shape[dim] else end
    at = subscript(attribute(x, "at"), *[_ALL] * axis, Expr(f"{low}:{high}" if step == 1 else f"{low}:{high}:{step}"))
    return method(at, "set", src)


@template("select_scatter.default")
def _select_scatter(x: Any, src: Any, dim: int, index: int) -> Expr:
    return method(subscript(attribute(x, "at"), *[_ALL] * (dim % len(x.shape)), index), "set", src)
