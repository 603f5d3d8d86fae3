"""How everyday operations are written in JAX: from the arguments of PyTorch's overloads to expressions.

An operation may have several ways of writing, simplest first; the first that computes what the table's function does is
taken. An operation without a template, or with other arguments than a template has, is a call of the table's function.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxtrain.torch_import.graph import DETACH, LEAF
from jaxtrain.torch_import.source.expressions import (
    Expr,
    attribute,
    binary,
    call,
    literal,
    method,
    subscript,
    unary,
    within,
)

Template = Callable[..., Expr | list[Expr]]
F = TypeVar("F", bound=Template)
TEMPLATES: dict[str, Template] = {}

KEY = Expr("next(keys)")
_ALL = Expr(":")


def template(*overloads: str) -> Callable[[F], F]:
    """Register a template for overloads of ATen operations."""

    def register(fn: F) -> F:
        TEMPLATES.update({f"aten.{overload}": fn for overload in overloads})
        return fn

    return register


def _named(function: str) -> Template:
    return lambda *args, **kwargs: call(function, *args, **kwargs)


def _operator(symbol: str) -> Template:
    return lambda x, y: binary(symbol, x, y)


for _name in ("square", "sqrt", "exp", "log", "log1p", "sin", "sinh", "cos", "tanh", "abs", "logical_not"):
    template(f"{_name}.default")(_named(f"jnp.{_name}"))
for _name in ("sigmoid", "silu", "relu"):
    template(f"{_name}.default")(_named(f"jax.nn.{_name}"))
for _name in ("maximum", "minimum", "logical_and", "logical_or"):
    template(f"{_name}.default")(_named(f"jnp.{_name}"))
for _symbol, _names in {
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "*": "mul",
    "/": "div",
    "&": "bitwise_and __and__",
    "|": "bitwise_or __or__",
}.items():
    for _name in _names.split():
        template(f"{_name}.Tensor", f"{_name}.Scalar")(_operator(_symbol))
template("bitwise_not.default")(lambda x: unary("~", x))
template("neg.default")(lambda x: unary("-", x))
template("reciprocal.default")(lambda x: binary("/", 1, x))
template("rsqrt.default")(_named("jax.lax.rsqrt"))
TEMPLATES[LEAF] = TEMPLATES[DETACH] = _named("jax.lax.stop_gradient")
template("matmul.default", "mm.default", "bmm.default", "mv.default")(_operator("@"))
template("native_dropout.default", "dropout.default")(lambda x, p, train=True: call("F.dropout", x, p, KEY))


@template("add.Tensor", "add.Scalar")
def _add(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return binary("+", x, y if alpha == 1 else binary("*", alpha, y))


@template("sub.Tensor", "sub.Scalar")
def _sub(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return binary("-", x, y if alpha == 1 else binary("*", alpha, y))


@template("rsub.Tensor", "rsub.Scalar")
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return _sub(y, x, alpha)


@template("pow.Tensor_Scalar")
def _pow(x: Any, exponent: Any) -> list[Expr]:
    whole = int(exponent) if float(exponent).is_integer() else exponent
    return [binary("**", x, whole), call("jnp.sqrt", x)]


@template("gelu.default")
def _gelu(x: Any, approximate: str = "none") -> Expr:
    return call("jax.nn.gelu", x, approximate=approximate == "tanh")


@template("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: Any, x: Any, y: Any) -> Expr:
    return call("jnp.where", condition, x, y)


@template("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> Expr:
    return call("jnp.where", mask, value, x)


@template("linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Expr:
    product = binary("@", x, attribute(weight, "T"))
    return product if bias is None else binary("+", product, bias)


@template("addmm.default", "baddbmm.default")
def _addmm(added: Any, x: Any, y: Any) -> Expr:
    return binary("+", binary("@", x, y), added)


@template("embedding.default")
def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> list[Expr]:
    return [subscript(weight, indices)] if padding_idx < 0 else []


@template("softmax.int", "_softmax.default")
def _softmax(x: Any, dim: int, dtype: Any = None) -> Expr:
    return call("jax.nn.softmax", _converted(x, dtype), **_axis(dim))


@template("log_softmax.int", "_log_softmax.default")
def _log_softmax(x: Any, dim: int, dtype: Any = None) -> Expr:
    return call("jax.nn.log_softmax", _converted(x, dtype), **_axis(dim))


def _axis(dim: int) -> dict[str, int]:
    return {} if dim == -1 else {"axis": dim}


def _converted(x: Any, dtype: Any) -> Any:
    if dtype is None or isinstance(dtype, bool) or dtype == x.dtype:
        return x
    return method(x, "astype", dtype)


@template("layer_norm.default")
def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> list[Expr]:
    if weight is None or bias is None or len(shape) > 1:
        return []
    return [call("F.layer_norm", x, weight, bias, eps)]


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
    first = subscript(attribute(x, "shape"), 0)
    lead = [] if start == 0 else [first] if start == 1 else [Expr(f"*{within(x, 10)}.shape[:{start}]")]
    tail = [] if end == len(x.shape) - 1 else [Expr(f"*{within(x, 10)}.shape[{end + 1}:]")]
    return [method(x, "reshape", *lead, -1, *tail)]


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
        return method(x, name, *([] if axis is None else [axis]), keepdims=keepdim or None, dtype=dtype)

    return reduce


for _name in ("sum", "mean"):
    template(f"{_name}.default", f"{_name}.dim", f"{_name}.dim_IntList")(_reduction(_name))
template("amax.default", "max.default")(_reduction("max"))
template("cumsum.default")(lambda x, dim, dtype=None: method(x, "cumsum", dim, dtype=dtype))
template("zeros.default")(lambda size, dtype=None: call("jnp.zeros", size, dtype))
template("ones.default")(lambda size, dtype=None: call("jnp.ones", size, dtype))
template("full.default")(lambda size, value, dtype=None: call("jnp.full", size, value, dtype))


@template("arange.default", "arange.start", "arange.start_step")
def _arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> list[Expr]:
    given = [start] if end is None else [start, end] if step == 1 else [start, end, step]
    return [
        call("jnp.arange", *given),
        call("jnp.arange", *given, dtype=dtype),
        call("jnp.asarray", call("np.arange", *given), *([] if dtype is None else [dtype])),
    ]
