"""Rows and tokens merged, for a product, and kept apart: what a mesh divides along both axes stays divided.

A linear layer takes [rows, tokens, width] as [rows · tokens, width] (`jaxtrain.models.linear`). Where a mesh divides
rows by one of its axes and tokens by another, what a device has is no contiguous part of that: the compiler would
gather the tokens, of every layer. So a product of what was merged, and the arithmetic beside it, is said of what it was
before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.transforms import jaxpr

BESIDE = frozenset({"add", "convert_element_type", "div", "mul", "select_n"})
"""Of a product: its bias, its conversions, an adapter's scale and dropout."""


class UnmergeRows:
    """A rule of `jaxtrain.transforms.jaxpr` for one evaluation, by which merged axes are kept apart: the same numbers.

    >>> import jax, jax.numpy as jnp
    >>> def linear(x, w):
    ...     return (x.reshape(6, 4) @ w).reshape(2, 3, 5)
    >>> traced = jax.make_jaxpr(jaxpr.transform(linear, UnmergeRows()))(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    >>> [eqn.outvars[0].aval.shape for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
    [(2, 3, 5)]
    """

    def __init__(self) -> None:
        # By id, a value and what it is a reshape of: both are kept, that no other value has the id.
        self._reshapes: dict[int, tuple[Any, Any]] = {}

    def __call__(self, eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        """The equation's outputs, or None where nothing it is given was merged."""
        name = eqn.primitive.name
        if name == "reshape" and eqn.params["dimensions"] is eqn.params["sharding"] is None:
            return [self._reshaped(args[0], eqn.params["new_sizes"])]
        merged = {axes for x in args if (axes := self._axes(x)) is not None}
        if len(merged) != 1:
            return None
        (axes,) = merged
        if jaxpr.is_call(eqn, "_where"):
            return jaxpr.evaluate_inner(eqn.params["jaxpr"], args, run)
        if name == "dot_general" and self._axes(args[0]) and _is_of_each(eqn):
            (contracted, of_kernel), batch = eqn.params["dimension_numbers"]
            numbers = ((tuple(i + 1 for i in contracted), of_kernel), batch)
            params = {**eqn.params, "dimension_numbers": numbers}
            return [self._merged(eqn.primitive.bind(self._apart(args[0], axes), args[1], **params))]
        if name in BESIDE:
            (out,) = jaxpr.bind(eqn, [self._apart(x, axes) for x in args])
            return [self._merged(out)]
        return None

    def _axes(self, x: Any) -> tuple[int, int] | None:
        """The sizes that the first axis of `x` is merged of; None where it is not."""
        _, origin = self._reshapes.get(id(x), (None, None))
        if origin is None or origin.ndim != x.ndim + 1 or origin.shape[2:] != x.shape[1:]:
            return None
        return origin.shape[0], origin.shape[1]

    def _apart(self, x: Any, axes: tuple[int, int]) -> Any:
        """`x` with its first axis as those two; with two of size 1 where it is one of size 1."""
        if not np.ndim(x):
            return x
        return self._reshaped(x, (*((1, 1) if x.shape[0] == 1 else axes), *x.shape[1:]))

    def _merged(self, x: Any) -> Any:
        return self._reshaped(x, (x.shape[0] * x.shape[1], *x.shape[2:]))

    def _reshaped(self, x: Any, shape: tuple[int, ...]) -> Any:
        """`x` in that shape, directly from what it is a reshape of itself."""
        _, origin = self._reshapes.get(id(x), (None, x))
        out = lax.reshape(origin, shape)
        if out is not origin:
            self._reshapes[id(out)] = out, origin
        return out


def _is_of_each(eqn: JaxprEqn) -> bool:
    """Whether the product is of each entry along the first operand's first axis."""
    (contracted, _), batch = eqn.params["dimension_numbers"]
    return 0 not in contracted and batch == ((), ())
