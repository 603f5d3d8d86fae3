"""Compute a whole function in a low precision, as a PyTorch model converted with `model.to(dtype)`.

The function is traced with its inputs in the low precision, so that every operation has the dtype that the code is
written for: conversions to float32 in it are kept. What PyTorch computes within one kernel in float32 stays in float32
where the code has several operations:

- the softmax, from the exponent's argument to the quotient or logarithm, is rounded once;
- a loss of `jaxtrain.losses` returns float32, which is rounded where it meets a value in low precision;
- a product whose result is asked for in float32 (`preferred_element_type`) has low-precision products as its gradient;
- the gradient of a value that is broadcast or gathered (a bias, an embedding) is summed in float32.

`kernel` and the norms of `jaxtrain.models` convert to float32 themselves.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxtrain.passes.numerics.autocast import DISABLED, KERNEL, LOSS, autocast_disabled, low_product, low_unrounded
from jaxtrain.passes.numerics.casts import is_array, to_dtype, widen
from jaxtrain.passes.numerics.exact_batch import exact_batch
from jaxtrain.passes.numerics.promoted_products import warn_promoted_products
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

_LOW = (jnp.bfloat16, jnp.float16)
# Between the exponent and its sum, in either direction.
_MASKING = (op.CONVERT_ELEMENT_TYPE, op.SELECT_N, op.MUL, op.RESHAPE, op.BROADCAST_IN_DIM)
_UNCHANGED = (op.SQUEEZE, op.STOP_GRADIENT, op.TRANSPOSE, op.COPY)
_WITHIN_SOFTMAX = {*_MASKING, *_UNCHANGED, op.REDUCE_SUM, op.LOG, op.ABS, op.SIGN}
_END_OF_SOFTMAX = (op.DIV, op.SUB, op.ADD)
_BROADCASTING = (op.ADD, op.SUB, op.MUL, op.DIV, op.MAX, op.MIN, op.POW)


def compute_in(
    fn: Callable[..., Any], dtype: Any, state_argnums: Collection[int] = (), batch_argnums: Collection[int] = ()
) -> Callable[..., Any]:
    """Compute a function in `dtype`, its softmaxes, norms and losses in float32 inside.

    Args:
      fn: A function of arrays.
      dtype: bfloat16 or float16.
      state_argnums: Positions of the arguments that keep their dtypes, as the running statistics of a BatchNorm.
      batch_argnums: Positions of the arguments that are a batch, which is rounded where products take it, and not in
        the arithmetic of a loss (`exact_batch`).

    Returns:
      The same function, whose other floating-point inputs are converted to `dtype` first.

    >>> x = jnp.ones((2, 2))
    >>> compute_in(lambda x: jnp.tanh(x @ x) + x, jnp.bfloat16)(x).dtype.name
    'bfloat16'
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        def cast(tree: Any) -> Any:
            return jax.tree.map(lambda x: to_dtype(dtype, x) if is_array(x) else x, tree)

        low = [x if i in (*state_argnums, *batch_argnums) else cast(x) for i, x in enumerate(args)]
        inner = exact_batch(fn, dtype, batch_argnums) if batch_argnums else fn
        return rewrite.retrace(inner, _evaluate)(*low, **cast(kwargs))

    return compute


def _evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
    warn_promoted_products(closed.jaxpr, op.PRODUCTS)
    starts = {*_softmax_starts(closed.jaxpr)}
    # By identity: values within a softmax, values computed from losses, and numbers repeated to an array.
    softmax: dict[int, Any] = {}
    losses: dict[int, Any] = {}
    numbers: dict[int, Any] = {}

    def noted(outs: list[Any], kind: dict[int, Any]) -> list[Any]:
        kind.update({id(out): out for out in outs})
        return outs

    def is_unrounded(var: Any, x: Any) -> bool:
        return id(x) in losses or (var.aval.dtype in _LOW and getattr(x, "dtype", None) == np.float32)

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        name = op.of(eqn)
        if name in op.CALLS and equations.in_scope(eqn, LOSS):
            return noted(rewrite.HIGHER_ORDER[name](eqn, args, _run_unrounded), losses)
        if equations.in_scope(eqn, DISABLED) or equations.is_call(eqn, KERNEL):
            return rewrite.bind_as_traced(eqn, args)
        in_softmax = any(id(x) in softmax for x in args)
        unrounded = any(is_unrounded(v, x) for v, x in zip(eqn.invars, args, strict=True))
        if name in op.CALLS and (unrounded or in_softmax):
            return rewrite.evaluate_inner(equations.body(eqn), args, run)
        if name in op.CALLS or (name in op.CHECKPOINTS and not in_softmax):
            return rewrite.HIGHER_ORDER[name](eqn, args, run)
        if name in rewrite.HIGHER_ORDER:
            return rewrite.HIGHER_ORDER[name](eqn, rewrite.cast_like([v.aval for v in eqn.invars], args), run)
        if equations.inner_jaxprs(eqn):
            return rewrite.bind_as_traced(eqn, args)
        if eqn.outvars[0] in starts or (in_softmax and name in _WITHIN_SOFTMAX):
            return noted(_in_float32(eqn, args), softmax)
        if in_softmax and name in _END_OF_SOFTMAX:
            return _as_written(eqn, _in_float32(eqn, args))
        if unrounded and not in_softmax and name not in op.PRODUCTS:
            outs = _in_float32(eqn, args)
            rounds = any(_is_low_array(x) and id(x) not in numbers for x in args)
            return _as_written(eqn, outs) if rounds else noted(outs, losses)
        outs = _bind_summing(eqn, rewrite.cast_like([v.aval for v in eqn.invars], args))
        if name == op.BROADCAST_IN_DIM and np.size(args[0]) == 1:
            noted(outs, numbers)
        return outs

    with autocast_disabled():
        outs = rewrite.interpret(closed.jaxpr, closed.consts, leaves, rule)
    pairs = zip(closed.out_avals, outs, strict=True)
    return [to_dtype(aval.dtype, out) if id(out) in softmax else out for aval, out in pairs]


class _Frame:
    """A jaxpr as called: the equations that make its variables, and the variables of the caller that are its inputs."""

    def __init__(self, traced: Jaxpr, inputs: Sequence[Any] = (), caller: "_Frame | None" = None) -> None:
        self.producers = equations.producers(traced)
        self.caller, self.inputs = caller, dict(zip(traced.invars, inputs, strict=False))

    def back(self, var: Any, through: Collection[str], to: str) -> Iterator[tuple[JaxprEqn, "_Frame"]]:
        """Yield the nearest equations `to` that `var` is computed from by those of `through` and by calls."""
        if isinstance(var, Literal):
            return
        eqn = self.producers.get(var)
        if eqn is None:
            if self.caller is not None and var in self.inputs:
                yield from self.caller.back(self.inputs[var], through, to)
        elif op.of(eqn) == to:
            yield eqn, self
        elif op.of(eqn) in op.CALLS:
            body = equations.body(eqn).jaxpr
            returned = body.outvars[eqn.outvars.index(var)]
            yield from _Frame(body, eqn.invars, self).back(returned, through, to)
        elif op.of(eqn) in through:
            for operand in eqn.invars:
                yield from self.back(operand, through, to)


def _softmax_starts(traced: Jaxpr) -> Iterator[Var]:
    """Yield the low-precision exponents that are summed and the differences that are their arguments."""
    frame = _Frame(traced)
    for eqn in equations.of(traced):
        if op.of(eqn) == op.REDUCE_SUM:
            for exp, at in frame.back(eqn.invars[0], _MASKING, op.EXP):
                if _aval(exp.outvars[0]).dtype in _LOW:
                    yield exp.outvars[0]
                    yield from (sub.outvars[0] for sub, _ in at.back(exp.invars[0], (op.SELECT_N,), op.SUB))
        for inner in equations.inner_jaxprs(eqn):
            yield from _softmax_starts(inner)


def _in_float32(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """Apply an operation in float32 and leave its results in float32."""
    converts = op.of(eqn) == op.CONVERT_ELEMENT_TYPE and equations.dtype(eqn) in (*_LOW, np.float32)
    return [widen(args[0])] if converts else rewrite.bind(eqn, [widen(x) for x in args])


def _as_written(eqn: JaxprEqn, outs: list[Any]) -> list[Any]:
    return rewrite.cast_like([v.aval for v in eqn.outvars], outs)


def _aval(var: Any) -> Any:
    return var.aval


def _is_low_array(x: Any) -> bool:
    return getattr(x, "dtype", None) in _LOW and np.size(x) > 1


def _run_unrounded(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a loss without the rounding of its result."""

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        rounds = op.of(eqn) == op.CONVERT_ELEMENT_TYPE and equations.dtype(eqn) in _LOW
        return [args[0]] if rounds and args[0].dtype == np.float32 else None

    return rewrite.interpret(body, consts, args, rule)


def _bind_summing(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """Apply an operation as written; the gradient of an operand that it repeats is summed in float32."""
    name = op.of(eqn)
    if name in _BROADCASTING:
        shape = _aval(eqn.outvars[0]).shape
        given = zip(eqn.invars, args, strict=True)
        return rewrite.bind(eqn, [x if isinstance(v, Literal) else _broadcast(x, shape) for v, x in given])
    if name in (op.BROADCAST_IN_DIM, op.GATHER) and not isinstance(eqn.invars[0], Literal):
        operand, *rest = args
        if name == op.BROADCAST_IN_DIM and operand.size == _aval(eqn.outvars[0]).size:
            return rewrite.bind(eqn, args)
        return [_sum_gradient(lambda x, *rest: rewrite.bind(eqn, [x, *rest])[0], operand, *rest)]
    if name in op.PRODUCTS and all(x.dtype in _LOW for x in args[:2]):
        if len(args) == 2 and _aval(eqn.outvars[0]).dtype == np.float32:
            return low_unrounded(eqn, args, args[0].dtype)
        return rewrite.bind(low_product(eqn, _aval(eqn.outvars[0]).dtype), args)
    return rewrite.bind(eqn, args)


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    if np.shape(x) == shape:
        return x
    axes = range(len(shape) - np.ndim(x), len(shape))
    return _sum_gradient(lambda x: lax.broadcast_in_dim(x, shape, axes), x)


def _sum_gradient(repeat: Callable[..., Any], operand: Any, *rest: Any) -> Any:
    """Apply a linear operation; the transpose of its derivative, a sum, is computed in float32."""
    if operand.dtype not in _LOW:
        return repeat(operand, *rest)
    apply = jax.custom_jvp(repeat)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, *others = primals
        wide, tangent = (to_dtype(np.float32, v) for v in (x, tangents[0]))
        _, out = jax.jvp(lambda x: repeat(x, *others), (wide,), (tangent,))
        return apply(*primals), to_dtype(x.dtype, out)

    apply.defjvp(jvp)
    return apply(operand, *rest)
