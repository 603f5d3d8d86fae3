"""Undo the merging of rows and tokens, so that arrays sharded along both axes stay sharded.

A linear layer takes [rows, tokens, width] as [rows · tokens, width] (`jaxtrain.models.layers.linear`). If a mesh shards
rows by one of its axes and tokens by another, a device's shard is not a contiguous part of the merged array, and the
compiler would gather the tokens of every layer. So products of merged arrays, and the arithmetic next to them, are
rewritten for the unmerged arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

ELEMENTWISE = frozenset({op.ADD, op.CONVERT_ELEMENT_TYPE, op.DIV, op.MUL, op.SELECT_N})
"""Primitives next to a product: its bias, its conversions, an adapter's scale and dropout."""


class UnmergeRows:
    """A rule for one evaluation by `jaxtrain.program.rewrite` that unmerges merged axes. The numbers are the same.

    >>> import jax, jax.numpy as jnp
    >>> def linear(x, w):
    ...     return (x.reshape(6, 4) @ w).reshape(2, 3, 5)
    >>> traced = jax.make_jaxpr(rewrite.transform(linear, UnmergeRows()))(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    >>> [eqn.outvars[0].aval.shape for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
    [(2, 3, 5)]
    """

    def __init__(self) -> None:
        # By id: a value and the array it is a reshape of. Both are stored, so that no other value gets the id.
        self._reshapes: dict[int, tuple[Any, Any]] = {}

    def __call__(self, eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        """Return the equation's outputs, or None if none of its arguments is merged."""
        name = op.of(eqn)
        if name == op.RESHAPE and equations.is_plain_reshape(eqn):
            return [self._reshape(args[0], eqn.outvars[0].aval.shape)]  # type: ignore[attr-defined]
        merged = {axes for x in args if (axes := self._axes(x)) is not None}
        if len(merged) != 1:
            return None
        (axes,) = merged
        if equations.is_call(eqn, "_where"):
            return rewrite.evaluate_inner(equations.body(eqn), args, run)
        if name == op.DOT_GENERAL and self._axes(args[0]) and _is_per_row(eqn):
            (contracted, of_kernel), batch = equations.contraction(eqn)
            numbers = ((tuple(i + 1 for i in contracted), of_kernel), batch)
            moved = equations.with_params(eqn, dimension_numbers=numbers)
            return [self._merge(rewrite.bind(moved, [self._unmerge(args[0], axes), args[1]])[0])]
        if name in ELEMENTWISE:
            (out,) = rewrite.bind(eqn, [self._unmerge(x, axes) for x in args])
            return [self._merge(out)]
        return None

    def _axes(self, x: Any) -> tuple[int, int] | None:
        """Return the sizes of the two axes merged into the first axis of `x`; None if it is not merged."""
        _, origin = self._reshapes.get(id(x), (None, None))
        if origin is None or origin.ndim != x.ndim + 1 or origin.shape[2:] != x.shape[1:]:
            return None
        return origin.shape[0], origin.shape[1]

    def _unmerge(self, x: Any, axes: tuple[int, int]) -> Any:
        """Split the first axis of `x` into those two axes; into two of size 1 if its size is 1."""
        if not np.ndim(x):
            return x
        return self._reshape(x, (*((1, 1) if x.shape[0] == 1 else axes), *x.shape[1:]))

    def _merge(self, x: Any) -> Any:
        return self._reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    def _reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Reshape `x`, directly from the array that it is a reshape of."""
        _, origin = self._reshapes.get(id(x), (None, x))
        out = lax.reshape(origin, shape)
        if out is not origin:
            self._reshapes[id(out)] = out, origin
        return out


def _is_per_row(eqn: JaxprEqn) -> bool:
    """Return whether the product treats each entry along the first operand's first axis separately."""
    (contracted, _), batch = equations.contraction(eqn)
    return 0 not in contracted and batch == ((), ())
