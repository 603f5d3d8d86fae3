"""Convert an array to 8 bits once for all products that multiply it with delayed scales.

The scales of queries, keys and values are kept apart, as TransformerEngine's linear layers keep them. They follow from
the largest magnitudes of the same array: they are equal from the first update on, by induction, because they start as
1. XLA cannot know it. The scale of the first product is taken for the others, for their results too, so that these stay
those of quantized operands where a state was edited, or where one kernel multiplies other arrays as well.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxtrain.passes.fp8.scaled_product import NAME
from jaxtrain.program import operations as op

_UNCHANGED = (op.OPTIMIZATION_BARRIER, op.RESHAPE, op.TRANSPOSE)


class SharedScales:
    """The arrays of a jaxpr that are converted by one scale.

    Attributes:
      are_lost: Whether an equation that is not a product reads an array that another scale converted.
    """

    def __init__(self) -> None:
        self._converted: dict[tuple[int, Any], tuple[Any, Any, Sequence[Any]]] = {}  # with the arrays, which stay alive
        self._scales: dict[int, tuple[Any, Any]] = {}
        self.are_lost = False

    def converted(self, x: Any, scale: Any, dtype: Any) -> Sequence[Any] | None:
        """Return an array that was converted by one scale already."""
        found = self._converted.get((id(x), dtype)) if scale.size == 1 else None
        if found is None:
            return None
        _, first, outs = found
        if first is not scale:
            self._scales[id(outs[0])] = outs[0], first
        return outs

    def note(self, x: Any, scale: Any, outs: Sequence[Any]) -> None:
        """Note an array and its conversion."""
        if scale.size == 1:
            self._converted[id(x), outs[0].dtype] = x, scale, outs

    def operands(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        """Return the operands of an equation, with the scales that its arrays were converted by."""
        if not any(id(x) in self._scales for x in args):
            return args
        if op.of(eqn) != NAME:
            self.are_lost |= op.of(eqn) not in _UNCHANGED
            return args
        args = [*args]
        for i in (0, 2):
            if id(args[i]) in self._scales:
                args[i + 1] = self._scales[id(args[i])][1].reshape(args[i + 1].shape)
        return args

    def follow(self, args: Sequence[Any], outs: Sequence[Any]) -> None:
        """Note arrays in another layout."""
        for x, out in zip(args, outs, strict=False):
            if id(x) in self._scales and isinstance(out, jax.Array):
                self._scales[id(out)] = out, self._scales[id(x)][1]

    def lose(self, results: Sequence[Any]) -> bool:
        """Return whether an array leaves the jaxpr without its scale."""
        return self.are_lost or any(id(x) in self._scales for x in results)
