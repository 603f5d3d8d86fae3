"""Add products in 8 bits where cuBLASLt computes them.

The gradient by the rows of several products, such as queries, keys and values, is the sum of one product for each.
cuBLASLt adds another array to the float32 sums of a product, which saves the passes over the memory that write all of
them and add them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.fp8.scaled_product import NAME
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

FUSED_BEHIND = (op.CONVERT_ELEMENT_TYPE, op.RESHAPE)
"""Primitives that a kernel which writes their operand computes as well."""
_ADD = (op.ADD, op.ADD_ANY)


class _Product(NamedTuple):
    """A product, or a sum of products.

    Attributes:
      eqn: The equation of the last one.
      operands: Its operands.
      value: Its result.
    """

    eqn: JaxprEqn
    operands: list[Any]
    value: jax.Array


class AddedProducts:
    """The products of a jaxpr that nothing but a sum reads.

    Args:
      traced: The jaxpr.
    """

    def __init__(self, traced: Jaxpr) -> None:
        self._uses = Counter(_reads(traced))
        self._products: dict[int, tuple[_Product, Any]] = {}  # by id, of values that stay alive

    def note(self, eqn: JaxprEqn, args: list[Any], outs: Sequence[Any]) -> None:
        """Note the result of an equation if it is a product, or one in another layout or in float32."""
        if op.of(eqn) == NAME and _is_added_by_a_library(eqn, args):
            self._products[id(outs[0])] = _Product(eqn, args, outs[0]), outs[0]
        elif op.of(eqn) in FUSED_BEHIND and self._is_read_once(eqn.invars) and _keeps_values(eqn):
            found = self._products.get(id(args[0]))
            self._products |= {} if found is None else {id(outs[0]): (found[0], outs[0])}

    def added(self, eqn: JaxprEqn, args: list[Any]) -> list[Any] | None:
        """Return the sum of two products, as a product to which the other one is added; None for any other equation.

        The sum is rounded to the dtype of the products, instead of the second product.
        """
        if op.of(eqn) not in _ADD or not self._is_read_once(eqn.invars):
            return None
        (first, last) = (self._products.get(id(x)) for x in args)
        if first is None or last is None or len(last[0].operands) > 4 or first[0].value.shape != last[0].value.shape:
            return None
        operands = [*last[0].operands, first[0].value]
        (value,) = rewrite.bind(last[0].eqn, operands)
        out = value.astype(args[0].dtype).reshape(args[0].shape)
        self._products[id(out)] = _Product(last[0].eqn, operands, value), out
        return [out]

    def enter(self, eqn: JaxprEqn, args: list[Any]) -> None:
        """Forget operands of a call that something else reads too."""
        for variable, x in zip(eqn.invars, args, strict=True):
            if not self._is_read_once([variable]):
                self._products.pop(id(x), None)

    def _is_read_once(self, variables: Sequence[Any]) -> bool:
        return all(isinstance(v, Literal) or self._uses[v] == 1 for v in variables)


def _is_added_by_a_library(eqn: JaxprEqn, args: list[Any]) -> bool:
    has_one_scale = args[1].size == args[3].size == 1
    return (
        has_one_scale
        and len(args) == 4
        and not equations.own(eqn, "tiled")
        and equations.own(eqn, "result").itemsize == 2
    )


def _keeps_values(eqn: JaxprEqn) -> bool:
    before, after = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    return after in (before, np.float32)


def _reads(traced: Jaxpr) -> Iterator[Any]:
    """Yield the variables that equations read, and those that are results, as often as they are."""
    for jaxpr in equations.nested(traced):
        yield from equations.reads(jaxpr)
