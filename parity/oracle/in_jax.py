"""Compute JAX code in float64, whatever dtypes it requests, by rewriting the jaxpr."""

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.errors import UserError
from jaxtrain.passes.fp8.scales import rounded_once
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from parity.oracle.literal import written_number

JAX_WIDER = {
    np.dtype(np.float32): np.dtype(np.float64),
    np.dtype(np.float16): np.dtype(np.float64),
    np.dtype(jnp.bfloat16): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.complex128),
}

NARROWER = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}
"""Dtypes of a program outside of x64 mode."""

ULPS = 2
"""Rounding error of an array computed in float32, in units in the last place of its largest element: those of a sine
are the rounding of its angle."""
ERRORS = 4099
"""Number of rounding errors that the constants of a program share; a prime, so that rows do not repeat them."""
BITS = "bits_of_float32"
"""Name of a jitted function that reads the bits of a number, which is rounded to float32 for it."""
DECLARED = frozenset({op.CALL_EXPORTED, op.FFI_CALL, op.IO_CALLBACK, op.PALLAS_CALL, op.PURE_CALLBACK, op.SCALED_DOT})
"""Primitives whose results have the dtype that they declare, most of them computed outside of XLA."""


def in_float64(fn: Callable[..., Any], errors: jax.Array | None = None) -> Callable[..., Any]:
    """Return `fn` with all floating arithmetic in float64, whatever dtypes it requests; requires JAX's x64 mode.

    This includes jit, loops, branches, `jax.checkpoint` and custom derivatives. Arrays that the program computed in
    float32 before it was traced, with NumPy for example, keep their rounding. A program that JAX rejects in x64 mode,
    because there its dtypes of 32 and of 64 bits meet, is traced in 32 bits: its integers stay so, its floats are
    converted, and float64 arrays of NumPy are rounded to float32.

    Args:
      fn: A function of arrays.
      errors: `rounding_errors`, which change those arrays within their rounding; None leaves them unchanged.

    Returns:
      The function.

    Raises:
      UserError: An operation cannot be converted: a callback, a bitcast of a float, a derivative with symbolic zeros.

    >>> with jax.enable_x64(True):
    ...     y = in_float64(lambda x: x.astype(jnp.float32) * 0.1)(np.ones(2))
    >>> y.tolist(), y.dtype.name
    ([0.1, 0.1], 'float64')
    """

    def lifted(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        return evaluate(closed if errors is None else _nudged(closed, errors), leaves)

    return rewrite.retrace(fn, lifted, _traced)


def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
    """Evaluate a program with all floating arithmetic in float64."""
    return _run(closed.jaxpr, closed.consts, [*map(_integer_as_traced, closed.in_avals, leaves)])


def _traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Trace `fn` as `jax.make_jaxpr` does, in 32 bits if it mixes dtypes in x64 mode."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):
            return jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        # After the handler, so that an error of this trace is not shown as one during the handling of another.
        return traced_in_32_bits(fn)(*args, **kwargs)

    return trace


def traced_in_32_bits(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Trace `fn` as `jax.make_jaxpr` does outside of x64 mode, whatever the mode and the dtypes of the arguments."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        narrow_args, narrow_kwargs = jax.tree.map(_narrow, (args, kwargs))
        with jax.enable_x64(False):
            return jax.make_jaxpr(fn, return_shape=True)(*narrow_args, **narrow_kwargs)

    return trace


def _narrow(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, NARROWER.get(aval.dtype, aval.dtype))


def _integer_as_traced(aval: Any, x: Any) -> Any:
    return lax.convert_element_type(x, aval.dtype) if jnp.issubdtype(aval.dtype, np.integer) else x


def rounding_errors(seed: int | None) -> jax.Array:
    """Return the errors of constants, as parts of the largest: float64[ERRORS] in [-1, 1); zeros for no seed."""
    return jnp.asarray(np.zeros(ERRORS) if seed is None else np.random.default_rng(seed).uniform(-1, 1, ERRORS))


def _nudged(closed: ClosedJaxpr, errors: jax.Array) -> ClosedJaxpr:
    """Return a program whose float32 arrays are in float64 and differ within their rounding."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return _nudged(value, errors)
        return tuple(map(changed, value)) if type(value) is tuple else value

    body = closed.jaxpr
    eqns = [equations.map_params(eqn, changed) for eqn in equations.of(body)]
    return ClosedJaxpr(body.replace(eqns=eqns), [_nudged_array(x, errors) for x in closed.consts])


def _nudged_array(x: Any, errors: jax.Array) -> Any:
    if getattr(x, "dtype", None) not in (np.float32, np.float64) or not np.ndim(x):
        return x
    values = np.asarray(x).astype(np.float32)
    if (values != np.asarray(x)).any():
        return x  # computed in float64
    # A number of few digits, such as a mask's 0 and 1, is not rounded.
    is_rounded = np.isfinite(values) & (values != np.round(values, 3))
    if not is_rounded.any():
        return x
    scale = ULPS * float(np.spacing(np.abs(values[is_rounded]).max()))
    exact = values.astype(np.float64)
    # Every array has its own errors, by its values; a long one repeats them.
    own = jnp.resize(jnp.roll(errors, zlib.crc32(values.tobytes()) % ERRORS), values.shape)
    return jnp.where(is_rounded, exact + scale * own, exact)


def _run(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    outs = rewrite.interpret(body, [*map(_wide, consts)], [*map(_wide, args)], _rule)
    return [_widened(v, x) for v, x in zip(body.outvars, outs, strict=True)]


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any]:
    del run  # unlike `_run`, it leaves literal results unchanged
    name = op.of(eqn)
    if equations.is_call(eqn, "_bernoulli") or equations.is_call(eqn, BITS):
        return rewrite.bind_as_traced(eqn, args)  # drawn from the bits of this precision
    args = [_widened(v, x) for v, x in zip(eqn.invars, args, strict=True)]
    if name == op.REDUCE_PRECISION:
        return args
    if name == op.BITCAST_CONVERT_TYPE:
        if getattr(eqn.invars[0].aval, "dtype", None) in JAX_WIDER:
            _refuse(eqn, "it reads the bits of a number: compute the value instead")
        return rewrite.bind(eqn, args)  # random draws are made of bits and stay unchanged
    if name == op.CUSTOM_VJP_CALL and equations.is_opaque(eqn):
        _refuse(eqn, "its derivative is opaque: write it without symbolic zeros, with everything it reads as arguments")
    if name in (op.SCAN, op.WHILE, op.COND):
        # Rebuilt with the dtypes of their bodies' arguments, which must be converted first.
        return rewrite.HIGHER_ORDER[name](_lifted(eqn), args, _as_it_is)
    if name in rewrite.HIGHER_ORDER:
        return rewrite.HIGHER_ORDER[name](eqn, args, _run)
    if name in DECLARED and any(_is_low(v.aval) for v in eqn.outvars):
        _refuse(eqn, "it returns the dtype that it declares: declare that of its arguments")
    if name == op.CALL_HI_PRIMITIVE:
        kind = equations.hijax_operation(eqn)
        _refuse(eqn, f"{kind} of jax.experimental.hijax has its own dtypes: write the model without it")
    if name == op.CONVERT_ELEMENT_TYPE and _is_8_bits(equations.dtype(eqn)):
        # As PyTorch does, by way of float32.
        return [rounded_once(lax.convert_element_type(args[0], np.float32), equations.dtype(eqn))]
    if name == op.DOT_GENERAL:
        args = [lax.convert_element_type(x, np.float64) if _is_8_bits(x.dtype) else x for x in args]
    return rewrite.bind(_lifted(eqn), args)


def _is_8_bits(dtype: Any) -> bool:
    return dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)


def _as_it_is(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return rewrite.interpret(body, consts, args, lambda *_: None)


def _lifted(eqn: JaxprEqn) -> JaxprEqn:
    return equations.map_params(eqn, _lifted_param)


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
    raise UserError(f"{op.of(eqn)} of the JAX model cannot be computed in float64: {why}")


def _widened(var: Any, x: Any) -> Any:
    """`x`, the value of `var`, in float64; a literal as the program wrote it."""
    if not (isinstance(var, Literal) and _is_low(x)):
        return _wide(x)
    written = complex(x)
    if np.iscomplexobj(x):
        return np.complex128(complex(written_number(written.real), written_number(written.imag)))
    return np.float64(written_number(written.real, x.dtype))


def _wide(x: Any) -> Any:
    return lax.convert_element_type(x, JAX_WIDER[x.dtype]) if _is_low(x) else x


def _is_low(x: Any) -> bool:
    return getattr(x, "dtype", None) in JAX_WIDER
