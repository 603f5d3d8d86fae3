"""The float64 truth of code that hard-wires lower precisions.

Taking a model's weights and batch to float64 does not make it compute in float64 where it says `.float()` or
`astype(float32)` itself, as RMSNorms and rotary embeddings do. Here every such request yields float64: in PyTorch as
the operations are dispatched, those of the backward pass too; in JAX in the jaxpr, before it is differentiated.
complex64 becomes complex128. What is no number keeps its bits: integers, booleans, keys, and the draws of dropout.

A scalar that the code wrote (`0.1`) has been rounded by the time it is seen, if float32 asked for it: `meant` finds
what was written. Arrays of constants keep the rounding they were made with, on both sides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from jaxtrain import jaxpr
from jaxtrain.errors import UserError

aten = torch.ops.aten

TORCH_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
JAX_WIDER = {
    np.dtype(np.float32): np.dtype(np.float64),
    np.dtype(np.float16): np.dtype(np.float64),
    np.dtype(jnp.bfloat16): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.complex128),
}

DECLARED = frozenset({"pure_callback", "io_callback", "ffi_call", "pallas_call"})
"""The primitives whose results are computed elsewhere, in the dtype that they declare."""

SIMPLE = 10_000
"""The largest product of numerator and denominator of a number that a program is taken to have meant exactly."""
FORMS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda x: x, lambda r: r),
    (lambda x: x * x, math.sqrt),  # 1/√d of attention
    (lambda x: math.pi * x * x, lambda r: math.sqrt(r / math.pi)),  # √(2/π) of GELU, 1/√2π of densities
    (lambda x: x / math.pi, lambda r: r * math.pi),
    (math.exp, math.log),  # log 10000 of positions
    (lambda x: x * math.log(2), lambda r: r / math.log(2)),
)
"""What makes a constant a simple fraction, and what brings it back."""


class InFloat64(TorchDispatchMode):
    """Inside it whatever PyTorch is asked for in float32, float16 or bfloat16 comes in float64.

    For a model and a batch already in float64. Conversions, `dtype=` of factories and of reductions, autocast's
    regions, the default dtype and tensors kept in a lower dtype are all widened; a backward pass run inside, too.
    Raises `UserError` for what stays low: a float32 tensor that is written to or trained, and a look at bits.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with InFloat64():
    ...     (x.float() + torch.ones(2, dtype=torch.bfloat16) / 3).dtype
    torch.float64
    """

    def __enter__(self) -> "InFloat64":
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of `torch.ones(2)`, and of a quotient of integers
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(exc_type, exc_value, traceback)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_liftable(func, args, kwargs)
        if func is aten.view.dtype:
            return func(*args, **kwargs)
        args, kwargs = tree_map(_lifted_torch, (args, kwargs))
        if func is aten.lift_fresh.default and args[0].ndim == 0 and args[0].is_floating_point():
            # What `torch.tensor(0.1, dtype=torch.float32)` had already rounded.
            return func(torch.full_like(args[0], meant(args[0].item())))
        return func(*args, **kwargs)


def _lifted_torch(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return TORCH_WIDER.get(x, x)
    if not isinstance(x, torch.Tensor) or x.dtype not in TORCH_WIDER:
        return x
    if x.requires_grad:
        raise UserError(f"a {_shortly(x)} is trained in the float64 run: make it a parameter of the model")
    return x.to(TORCH_WIDER[x.dtype])


def _check_liftable(func: Any, args: Any, kwargs: Any) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if func is aten.view.dtype:
        bits_of_a_number = given["self"].is_floating_point() and given["dtype"].itemsize < given["self"].itemsize
        if given["dtype"] in TORCH_WIDER or bits_of_a_number:
            raise UserError(
                f"{func} to {given['dtype']} reads a number's bits, which are others in float64: compute it"
            )
    for argument in func._schema.arguments:
        x = given.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(x, torch.Tensor) and x.dtype in TORCH_WIDER:
            raise UserError(f"{func} writes to a {_shortly(x)} in the float64 run: make it a buffer of the model")


def _shortly(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)}"


def in_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with all of its floating arithmetic in float64, whatever dtypes it asks for; needs JAX's x64 mode.

    Also inside jit, loops, branches, `jax.checkpoint` and custom derivatives. Raises `UserError` for an operation
    that stays low: a callback, a look at a number's bits, a derivative with symbolic zeros.

    >>> with jax.enable_x64(True):
    ...     y = in_float64(lambda x: x.astype(jnp.float32) * 0.1)(np.ones(2))
    >>> y.tolist(), y.dtype.name
    ([0.1, 0.1], 'float64')
    """

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, leaves)

    return jaxpr.retraced(fn, evaluate)


def _run(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    outs = jaxpr.interpret(body, [*map(_wide, consts)], [*map(_wide, args)], _rule)
    return [_widened(v, x) for v, x in zip(body.outvars, outs, strict=True)]


def _rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> list[Any]:
    del run  # unlike `_run` it leaves literal results as they are
    name = eqn.primitive.name
    if jaxpr.calls(eqn, "_bernoulli"):
        return jaxpr.as_traced(eqn, args)  # a decision, made of the bits that this precision has
    args = [_widened(v, x) for v, x in zip(eqn.invars, args, strict=True)]
    if name == "reduce_precision":
        return args
    if name == "bitcast_convert_type":
        if getattr(eqn.invars[0].aval, "dtype", None) in JAX_WIDER:
            _refuse(eqn, "it reads a number's bits: compute what they say")
        return jaxpr.bind(eqn, args)  # draws are made of bits, and stay what they were
    if name == "custom_vjp_call" and (eqn.params["symbolic_zeros"] or eqn.params["num_consts"]):
        _refuse(eqn, "its derivative is opaque: write it without symbolic zeros, all it reads being arguments")
    if name in ("scan", "while", "cond"):
        # Rebuilt with the dtypes of their bodies' arguments: those have to be wide first.
        return jaxpr.HIGHER_ORDER[name](_lifted(eqn), args, _as_it_is)
    if name in jaxpr.HIGHER_ORDER:
        return jaxpr.HIGHER_ORDER[name](eqn, args, _run)
    if name in DECLARED and any(_is_low(v.aval) for v in eqn.outvars):
        _refuse(eqn, "it returns the dtype it declared: declare that of its arguments")
    return jaxpr.bind(_lifted(eqn), args)


def _as_it_is(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return jaxpr.interpret(body, consts, args, lambda *_: None)


def _lifted(eqn: JaxprEqn) -> JaxprEqn:
    return eqn.replace(params={key: _lifted_param(value) for key, value in eqn.params.items()})


def _lifted_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        avals = [jax.ShapeDtypeStruct(aval.shape, JAX_WIDER.get(aval.dtype, aval.dtype)) for aval in value.in_avals]
        return jax.make_jaxpr(lambda *args: _run(value.jaxpr, value.consts, args))(*avals)
    if isinstance(value, Jaxpr):
        return _lifted_param(ClosedJaxpr(value, ())).jaxpr
    if isinstance(value, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return lax.Precision.HIGHEST
    if isinstance(value, tuple):
        items = [_lifted_param(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return JAX_WIDER.get(np.dtype(value), value)
    return value


def _refuse(eqn: JaxprEqn, why: str) -> None:
    raise UserError(f"{eqn.primitive.name} of the JAX model cannot be computed in float64: {why}")


def _widened(var: Any, x: Any) -> Any:
    """`x`, the value of `var`, in float64; a literal as it was written."""
    if not (isinstance(var, Literal) and _is_low(x)):
        return _wide(x)
    written = complex(x)
    if np.iscomplexobj(x):
        return np.complex128(complex(meant(written.real), meant(written.imag)))
    return np.float64(meant(written.real, x.dtype))


def _wide(x: Any) -> Any:
    return lax.convert_element_type(x, JAX_WIDER[x.dtype]) if _is_low(x) else x


def _is_low(x: Any) -> bool:
    return getattr(x, "dtype", None) in JAX_WIDER


def meant(x: float, dtype: Any = np.float32) -> float:
    """The number that a program meant which now holds `x`, what `dtype` rounded it to.

    That is a decimal of few digits or, of float32, a fraction, root, logarithm or part of π as simple as programs
    use, if there is one that rounds to `x`; else `x` itself.

    >>> numbers = (1e-6, 1 / 3, math.sqrt(1 / 24), math.sqrt(2 / math.pi), math.log(10000))
    >>> [meant(float(np.float32(y))) == y for y in numbers]
    [True, True, True, True, True]
    >>> meant(0.7316888)
    0.7316888
    """
    rounded = np.asarray(x, dtype)
    return next((y for y in _candidates(x, dtype) if np.asarray(y, dtype) == rounded), x)


def _candidates(x: float, dtype: Any) -> Iterator[float]:
    """From the likeliest to the least likely."""
    if not math.isfinite(x) or x.is_integer():
        return
    digits = jnp.finfo(dtype).precision
    yield float(f"{x:.{min(digits, 4)}g}")
    if dtype == np.float32 and 1e-4 < abs(x) < 1e2:
        for simple, back in FORMS:
            number = simple(abs(x))
            fraction = Fraction(number).limit_denominator(1 + int(math.sqrt(SIMPLE / number)))
            if 0 < fraction.numerator * fraction.denominator <= SIMPLE:
                yield math.copysign(back(float(fraction)), x)
    yield float(f"{x:.{digits}g}")
