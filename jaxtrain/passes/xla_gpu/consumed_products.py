"""Rewrite low-precision matrix products together with the one operation that uses their result."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.biased_product import biased_product
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import sole_sources
from jaxtrain.program.platform import on_gpu

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


class Product(NamedTuple):
    """A product that is not computed yet.

    Attributes:
      operands: Rows [n, k], columns [k, m] and, if there is one, the bias [1, m].
      multiply: Multiplies such operands.
    """

    operands: tuple[jax.Array, ...]
    multiply: Callable[..., jax.Array]


def rewrite_products(
    fn: Callable[..., Any],
    platform: str | None,
    consumes: Callable[[JaxprEqn], bool],
    rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> Callable[..., Any]:
    """Rewrite the equations of a program for a GPU that are the only ones to use a product, itself or reshaped.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.
      consumes: Whether an equation is to be rewritten.
      rule: `rule(eqn, args)` returns the results of such an equation; one of its arguments is a `Product`.

    Returns:
      The same function on a GPU. On any other platform, `fn`.
    """

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        consumed = {var for var, eqn in sole_sources(closed.jaxpr, consumes, _keeps_columns) if _is_product(eqn)}

        def evaluated(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
            del run
            if not consumed.isdisjoint(eqn.outvars):
                return [Product(tuple(args), _multiply(eqn))]
            if any(isinstance(x, Product) for x in args):
                return args if op.of(eqn) == op.RESHAPE else rule(eqn, args)
            return None

        return rewrite.interpret(
            closed.jaxpr, closed.consts, leaves, evaluated, lambda eqn: not consumed.isdisjoint(eqn.outvars)
        )

    return on_gpu(fn, rewrite.retrace(fn, evaluate), platform)


def _multiply(eqn: JaxprEqn) -> Callable[..., jax.Array]:
    def multiply(*operands: jax.Array) -> jax.Array:
        return rewrite.bind(eqn, operands)[0]

    def multiply_and_add(rows: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return biased_product(rows, kernel, bias, _ROWS_BY_COLUMNS)

    return multiply if op.of(eqn) == op.DOT_GENERAL else multiply_and_add


def _keeps_columns(eqn: JaxprEqn) -> bool:
    if op.of(eqn) != op.RESHAPE:
        return False
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    return bool(before and after and before[-1] == after[-1])


def _is_product(eqn: JaxprEqn) -> bool:
    if op.of(eqn) == op.CUSTOM_JVP_CALL:
        inner = equations.sole(equations.body(eqn))
        if inner is None or op.of(inner) != BIASED_PRODUCT:
            return False
        eqn = inner
    elif op.of(eqn) != op.DOT_GENERAL:
        return False
    dtypes = {v.aval.dtype for v in [*eqn.invars, *eqn.outvars]}  # type: ignore[attr-defined]
    ((left, right), batch) = equations.contraction(eqn)
    is_low = len(dtypes) == 1 and dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}
    return is_low and ((tuple(left), tuple(right)), batch) == _ROWS_BY_COLUMNS
