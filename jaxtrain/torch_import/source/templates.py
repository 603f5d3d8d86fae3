"""How operations are written in JAX: from the arguments of PyTorch's overloads to expressions.

An operation may have several ways of writing, simplest first; the first that computes what the table's function does is
taken. An operation without a template is a call of the table's function.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxtrain.torch_import.source.expressions import (
    Expr,
    attribute,
    binary,
    call,
    literal,
    method,
    subscript,
    unary,
)

Template = Callable[..., Expr | list[Expr]]
F = TypeVar("F", bound=Template)
TEMPLATES: dict[str, Template] = {}

KEY = Expr("next(keys)")


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


for _name in (
    *("square", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh"),
    *("tanh", "floor", "ceil", "isnan", "isinf"),
):
    template(f"{_name}.default")(_named(f"jnp.{_name}"))
for _name in ["sigmoid", "silu", "log_sigmoid", "relu"]:
    template(f"{_name}.default")(_named(f"jax.nn.{_name}"))
for _name in ["maximum", "minimum", "logical_and", "logical_or", "logical_xor"]:
    template(f"{_name}.default")(_named(f"jnp.{_name}"))
for _symbol, _names in {
    "==": "eq",
    "!=": "ne",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "*": "mul",
    "&": "bitwise_and __and__",
    "|": "bitwise_or __or__",
    "^": "bitwise_xor",
}.items():
    for _name in _names.split():
        template(f"{_name}.Tensor", f"{_name}.Scalar")(_operator(_symbol))
template("rsqrt.default")(_named("jax.lax.rsqrt"))
template("erf.default")(_named("jax.lax.erf"))
template("logical_not.default", "bitwise_not.default")(lambda x: [unary("~", x), call("jnp.logical_not", x)])
template("neg.default")(lambda x: unary("-", x))
template("reciprocal.default")(lambda x: binary("/", 1, x))
template("abs.default")(lambda x: [call("jnp.abs", x), call("F.abs", x)])
template("max.other")(_named("jnp.maximum"))
template("min.other")(_named("jnp.minimum"))
template("detach.default")(_named("jax.lax.stop_gradient"))
template("matmul.default", "mm.default", "bmm.default", "mv.default")(_operator("@"))


@template("add.Tensor", "add.Scalar")
def _add(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return binary("+", x, y if alpha == 1 else binary("*", alpha, y))


@template("sub.Tensor", "sub.Scalar")
def _sub(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return binary("-", x, y if alpha == 1 else binary("*", alpha, y))


@template("rsub.Tensor", "rsub.Scalar")
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Expr:
    return _sub(y, x, alpha)


@template("div.Tensor", "div.Scalar")
def _div(x: Any, y: Any) -> Expr:
    return binary("/", x, y)


@template("pow.Tensor_Scalar")
def _pow(x: Any, exponent: Any) -> list[Expr]:
    whole = int(exponent) if float(exponent).is_integer() else exponent
    return [binary("**", x, whole), call("jnp.sqrt", x), call("jax.lax.integer_pow", x, whole)]


@template("pow.Scalar")
def _pow_of_number(x: Any, exponent: Any) -> Expr:
    return call("jnp.power", x, exponent)


@template("gelu.default")
def _gelu(x: Any, approximate: str = "none") -> list[Expr]:
    by_tanh = approximate == "tanh"
    return [
        call("jax.nn.gelu", x, approximate=by_tanh),
        call("F.gelu", x, approximate=approximate if by_tanh else None),
    ]


@template("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: Any, x: Any, y: Any) -> Expr:
    return call("jnp.where", condition, x, y)


@template("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> list[Expr]:
    return [call("jnp.where", mask, value, x), call("jnp.where", mask, _as_array(value, x), x)]


def _as_array(value: Any, like: Expr) -> Expr:
    if isinstance(value, Expr):
        return method(value, "astype", attribute(like, "dtype"))
    return call("jnp.asarray", value, literal(like.dtype))


@template("linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Expr:
    product = binary("@", x, attribute(weight, "T"))
    return product if bias is None else binary("+", product, bias)


@template("addmm.default", "baddbmm.default")
def _addmm(added: Any, x: Any, y: Any) -> Expr:
    return binary("+", binary("@", x, y), added)


@template("embedding.default")
def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> Expr:
    return subscript(weight, indices) if padding_idx < 0 else call("F.embedding", weight, indices, padding_idx)


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


@template("rms_norm.default")
def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Expr:
    return call("F.rms_norm", x, shape, weight, **({} if eps is None else {"eps": eps}))


@template("group_norm.default")
def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Expr:
    return call("F.group_norm", x, groups, weight, bias, eps=None if eps == 1e-5 else eps)


@template("native_dropout.default", "dropout.default")
def _dropout(x: Any, p: float, train: Any = True) -> list[Expr]:
    return [call("F.dropout", x, p, KEY)]


@template("scaled_dot_product_attention.default")
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
) -> Expr:
    rng = KEY if dropout_p else None
    return call(
        "F.scaled_dot_product_attention",
        *(query, key, value),
        *([] if attn_mask is None else [attn_mask]),
        dropout_p=dropout_p or None,
        is_causal=is_causal or None,
        scale=scale,
        window=window,
        rng=rng,
    )


@template("conv1d.default", "conv2d.default", "conv3d.default")
def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Expr:
    options = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1), "groups": (groups, 1)}
    given = {name: _one(value) for name, (value, default) in options.items() if _one(value) != default}
    return call("F.conv", x, weight, *([] if bias is None else [bias]), **given)


def _one(value: Any) -> Any:
    """Return one number for equal ones."""
    return value[0] if isinstance(value, tuple) and len({*value}) == 1 else value


@template("cross_entropy_loss.default")
def _cross_entropy(
    logits: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, smoothing: float = 0.0
) -> Expr:
    return call(
        "F.cross_entropy",
        *(logits, target),
        weight=weight,
        reduction=None if reduction == 1 else reduction,
        ignore_index=None if ignore_index == -100 else ignore_index,
        label_smoothing=smoothing or None,
    )
