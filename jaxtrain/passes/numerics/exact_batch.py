"""The batch in a policy that computes in low precision: rounded where the model takes it, float32 in the loss.

A function of parameters and a batch is traced with all of it in the low precision, so that the model computes as it is
written, and evaluated with the batch in float32. What an operation does with it depends on where its result goes:

- an operation whose result enters a product with a parameter or an activation takes the batch in the low precision, as
  the inputs of the modules of PyTorch's FSDP with `MixedPrecision(cast_forward_inputs=True)`;
- every other operation, which is the loss arithmetic, takes it in float32, and so what it meets there: labels, weights
  and masks are not rounded, nor are counts made of integers, and sums stay float32.

Numbers written in Python have the precision of what they meet, so that those of the loss are traced again in float32.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.numerics.casts import is_array, to_dtype, widen
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

_LOW = (jnp.bfloat16, jnp.float16)
_WITH_RESULTS = (op.SCAN, op.WHILE, op.COND)
_DTYPES = ("new_dtype", "dtype", "preferred_element_type")
_MARKED = "autocast_"  # what the names of functions begin with that autocast computes in its own way


def exact_batch(fn: Callable[..., Any], dtype: Any, batch_argnums: Collection[int]) -> Callable[..., Any]:
    """Trace a function with its batch in `dtype`, and compute what is not the model's with the batch in float32.

    Args:
      fn: A function of arrays, whose other arguments have the dtypes to compute in.
      dtype: bfloat16 or float16.
      batch_argnums: Positions of the arguments that are a batch.

    Returns:
      The same function, whose floating-point results may be float32 instead of `dtype`.

    Example:
      >>> def loss(w, batch):
      ...     return ((batch["x"] @ w - batch["y"]) * batch["weight"]).sum(), batch["weight"].sum()
      >>> batch = {"x": jnp.ones((1001, 2)), "y": jnp.ones(1001), "weight": jnp.ones(1001)}
      >>> total, weight = exact_batch(loss, jnp.bfloat16, (1,))(jnp.ones(2, jnp.bfloat16), batch)
      >>> total.dtype.name, float(weight)
      ('float32', 1001.0)
    """

    def batch_in(kind: Any, args: Sequence[Any]) -> list[Any]:
        def cast(tree: Any) -> Any:
            return jax.tree.map(lambda x: to_dtype(kind, x) if is_array(x) else x, tree)

        return [cast(x) if i in batch_argnums else x for i, x in enumerate(args)]

    def computed(*args: Any) -> Any:
        closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*batch_in(dtype, args))

        @cache
        def literals() -> dict[int, Any]:
            wide = [x if i in batch_argnums else jax.tree.map(widen, x) for i, x in enumerate(args)]
            return _wide_literals(closed.jaxpr, jax.make_jaxpr(fn)(*batch_in(np.float32, wide)).jaxpr)

        wide = batch_in(np.float32, args)
        is_batch = [i in batch_argnums for i, x in enumerate(args) for _ in jax.tree.leaves(x)]
        active = [not batch for batch in is_batch]
        outs = _Evaluation(literals).run(
            closed.jaxpr, closed.consts, jax.tree.leaves(wide), active, [False] * len(closed.jaxpr.outvars)
        )
        return jax.tree.unflatten(jax.tree.structure(out_shape), map(jnp.asarray, outs))

    return computed


class _Evaluation:
    """Evaluates jaxprs with values in float32 where they were traced in low precision: these are called wide.

    Args:
      literals: Returns the numbers written in Python, by the identity of their literal, in float32.
    """

    def __init__(self, literals: Callable[[], dict[int, Any]]) -> None:
        self._literals = literals

    def run(
        self, body: Jaxpr, consts: Sequence[Any], args: Sequence[Any], active: Sequence[bool], enters: Sequence[bool]
    ) -> list[Any]:
        """Evaluate a jaxpr.

        Args:
          body: The jaxpr.
          consts: Its constants.
          args: Its arguments.
          active: Which arguments depend on parameters.
          enters: Which results enter products.
        """
        depending, producers = _depending(body, active), equations.producers(body)
        entering = _entering(body, depending, enters)

        def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
            del run
            floats = [v for v in eqn.outvars if jnp.issubdtype(_dtype(v), np.inexact)]
            is_model = _is_product(eqn, depending) or (bool(floats) and all(v in entering for v in floats))
            if equations.inner_jaxprs(eqn):
                return self._higher_order(eqn, args, is_model, depending, entering)
            if is_model or op.of(eqn) == op.BITCAST_CONVERT_TYPE:
                return _as_traced(eqn, args)
            if any(map(_is_wide, eqn.invars, args)) or _is_exact(eqn, producers):
                return self._in_float32(eqn, args)
            return None

        return rewrite.interpret(body, consts, args, rule)

    def _higher_order(
        self, eqn: JaxprEqn, args: list[Any], is_model: bool, depending: set[Any], entering: set[Any]
    ) -> Sequence[Any]:
        name = op.of(eqn)
        is_marked = str(equations.label(eqn)).startswith(_MARKED)
        is_untouched = name.startswith("custom_") and not any(map(_is_wide, eqn.invars, args))
        if is_model or is_marked or is_untouched or name not in _REBUILT:
            return _as_traced(eqn, args)
        active = [_is_in(v, depending) for v in eqn.invars]
        enters = [_is_in(v, entering) for v in eqn.outvars]

        def run(body: Jaxpr, consts: Sequence[Any], inner: Sequence[Any]) -> list[Any]:
            return self.run(body, consts, inner, *_REBUILT[name](eqn, body, active, enters))

        if name not in _WITH_RESULTS:
            return rewrite.HIGHER_ORDER[name](eqn, args, run)
        body, _ = next(_bodies(eqn))
        _, enters = _REBUILT[name](eqn, body, active, enters)
        results = [_widened(v.aval, does) for v, does in zip(eqn.outvars, enters, strict=True)]
        return rewrite.HIGHER_ORDER[name](eqn, args, run, results)

    def _in_float32(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        dtypes = {k: np.dtype(np.float32) for k, v in equations.params(eqn).items() if k in _DTYPES and v in _LOW}
        wide = [self._literal(v) if _is_low_literal(v) else widen(x) for v, x in zip(eqn.invars, args, strict=True)]
        return rewrite.bind(equations.with_params(eqn, **dtypes), wide)

    def _literal(self, literal: Any) -> Any:
        return self._literals().get(id(literal), np.float32(literal.val))


def _as_traced(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    return rewrite.bind(
        eqn, [to_dtype(_dtype(v), x) if _is_wide(v, x) else x for v, x in zip(eqn.invars, args, strict=True)]
    )


def _widened(aval: Any, enters: bool) -> Any:
    """Return the shape and dtype of a result of a loop or a branch, in float32 unless it enters a product."""
    is_loss = getattr(aval, "dtype", None) in _LOW and not enters
    return jax.ShapeDtypeStruct(aval.shape, np.float32) if is_loss else aval


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _is_wide(var: Any, x: Any) -> bool:
    return getattr(var.aval, "dtype", None) in _LOW and getattr(x, "dtype", None) == np.float32


def _is_low_literal(var: Any) -> bool:
    return isinstance(var, Literal) and _dtype(var) in _LOW


def _is_in(var: Any, found: set[Any]) -> bool:
    return not isinstance(var, Literal) and var in found


def _is_product(eqn: JaxprEqn, depending: set[Any]) -> bool:
    """Return whether this is a product in low precision with a parameter or an activation."""
    operands = eqn.invars[:2]
    is_low = op.of(eqn) in op.PRODUCTS and all(_dtype(v) in _LOW for v in operands)
    return is_low and any(_is_in(v, depending) for v in operands)


def _is_exact(eqn: JaxprEqn, producers: Mapping[Any, JaxprEqn]) -> bool:
    """Return whether an operation makes numbers in low precision of what is more exact: integers, constants, sums."""
    if _dtype(eqn.outvars[0]) not in _LOW:
        return False
    if op.of(eqn) == op.CONVERT_ELEMENT_TYPE:
        (operand,) = eqn.invars
        return not jnp.issubdtype(_dtype(operand), np.inexact) or _is_sum(operand, producers)
    return all(isinstance(v, Literal) for v in eqn.invars)


def _is_sum(var: Any, producers: Mapping[Any, JaxprEqn]) -> bool:
    """Return whether a float32 value is a scalar, or a sum or mean, which `jax.numpy` computes in float32."""
    if _dtype(var) != np.float32 or isinstance(var, Literal):
        return False
    producer = producers.get(var)
    if producer is not None and op.of(producer) == op.DIV:
        return _is_sum(producer.invars[0], producers)
    return var.aval.shape == () or (producer is not None and op.of(producer) == op.REDUCE_SUM)


def _depending(body: Jaxpr, active: Sequence[bool]) -> set[Any]:
    """Return the variables that depend on the arguments marked as active."""
    depending = {v for v, is_active in zip(body.invars, active, strict=True) if is_active}
    for eqn in equations.of(body):
        if any(_is_in(v, depending) for v in eqn.invars):
            depending.update(eqn.outvars)
    return depending


def _entering(body: Jaxpr, depending: set[Any], enters: Sequence[bool]) -> set[Any]:
    """Return the variables that enter a product, or a result that enters one outside."""
    entering = {v for v, does in zip(body.outvars, enters, strict=True) if does and not isinstance(v, Literal)}
    for eqn in reversed(equations.of(body)):
        if _is_product(eqn, depending):
            flags = [True] * len(eqn.invars)
        elif equations.inner_jaxprs(eqn):
            flags = _operands_entering(eqn, depending, [_is_in(v, entering) for v in eqn.outvars])
        else:
            flags = [any(v in entering for v in eqn.outvars)] * len(eqn.invars)
        entering.update(v for v, does in zip(eqn.invars, flags, strict=True) if does and not isinstance(v, Literal))
    return entering


def _operands_entering(eqn: JaxprEqn, depending: set[Any], enters: list[bool]) -> list[bool]:
    """Return which operands of an equation with inner jaxprs enter products, inside or after it."""
    active = [_is_in(v, depending) for v in eqn.invars]
    name, flags = op.of(eqn), [False] * len(eqn.invars)
    if name not in _REBUILT:
        has_product = any(_has_product(inner) for inner in equations.inner_jaxprs(eqn))
        return [has_product or any(enters)] * len(eqn.invars)
    for body, offset in _bodies(eqn):
        of_body, results = _REBUILT[name](eqn, body, active, enters)
        inner = _entering(body, _depending(body, of_body), results)
        for i, var in enumerate(body.invars):
            flags[offset(i)] |= var in inner
    return flags


def _has_product(body: Jaxpr) -> bool:
    return any(op.of(eqn) in op.PRODUCTS for eqn in equations.visit(body))


def _bodies(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Callable[[int], int]]]:
    """Yield the bodies of an equation, each with a function from the number of its argument to that of the operand."""
    name = op.of(eqn)
    if name == op.COND:
        for branch in equations.branches(eqn):
            yield branch.jaxpr, lambda i: i + 1
    elif name == op.WHILE:
        loop = equations.while_loop(eqn)
        yield loop.body.jaxpr, lambda i: i + loop.n_condition
        yield loop.condition.jaxpr, lambda i: i if i < loop.n_condition else i + loop.n_body
    else:
        body = equations.body(eqn)
        yield (body.jaxpr if isinstance(body, ClosedJaxpr) else body), lambda i: i


def _flags_of_call(eqn: JaxprEqn, body: Jaxpr, active: list[bool], enters: list[bool]) -> tuple[list[bool], list[bool]]:
    """Return which arguments of a body are active and which of its results enter products: those of the equation."""
    if len(active) == len(body.invars) and len(enters) == len(body.outvars):
        return active, enters
    # A rule for derivatives, of primals and tangents or of residuals and cotangents.
    return [any(active)] * len(body.invars), [any(enters)] * len(body.outvars)


def _flags_of_cond(eqn: JaxprEqn, body: Jaxpr, active: list[bool], enters: list[bool]) -> tuple[list[bool], list[bool]]:
    return active[1:], enters


def _flags_of_loop(eqn: JaxprEqn, body: Jaxpr, active: list[bool], enters: list[bool]) -> tuple[list[bool], list[bool]]:
    """As of a call; a carry depends on what any of them does, and enters what it enters in another iteration."""
    if op.of(eqn) == op.SCAN:
        n_consts, n_carry = equations.scan_sizes(eqn)
    else:
        loop = equations.while_loop(eqn)
        n_consts, n_carry = loop.n_body, len(eqn.outvars)
        if body is loop.condition.jaxpr:
            return [any(active)] * len(body.invars), [False]
        active = active[loop.n_condition :]
    carries = slice(n_consts, n_consts + n_carry)
    active = [*active]
    active[carries] = [any(active)] * n_carry
    depending, enters = _depending(body, active), [*enters]
    while True:
        entering = _entering(body, depending, enters)
        joined = [is_in or v in entering for is_in, v in zip(enters[:n_carry], body.invars[carries], strict=True)]
        if joined == enters[:n_carry]:
            return active, enters
        enters[:n_carry] = joined


_REBUILT: dict[str, Callable[..., tuple[list[bool], list[bool]]]] = {
    **dict.fromkeys(op.APPLICATIONS - {*op.EVALUATIONS}, _flags_of_call),
    op.COND: _flags_of_cond,
    op.SCAN: _flags_of_loop,
    op.WHILE: _flags_of_loop,
}


def _wide_literals(low: Jaxpr, wide: Jaxpr) -> dict[int, Any]:
    """Return the float32 numbers of a program by the identity of the same literals in it in low precision.

    A number that depends on the dtype, as an epsilon, is left out, and all of a program that has others in float32.
    """
    pairs = list(_literals(low)), list(_literals(wide))
    if len(pairs[0]) != len(pairs[1]):
        return {}
    with np.errstate(over="ignore"):
        return {
            id(a): np.float32(b.val)
            for a, b in zip(*pairs, strict=True)
            if _dtype(a) in _LOW and np.asarray(b.val).astype(_dtype(a)) == np.asarray(a.val)
        }


def _literals(body: Jaxpr) -> Iterator[Any]:
    """Yield the floating-point numbers of a program in order."""
    for eqn in equations.visit(body):
        yield from (v for v in eqn.invars if isinstance(v, Literal) and jnp.issubdtype(_dtype(v), np.floating))
