"""Parameters that are stored in a lower precision than the program computes with.

Frozen parameters need no float32 masters: nothing is added to them. A program that is written for float32 parameters
takes bfloat16 ones here and converts them where they are used, a layer at a time where layers are scanned. A product
that converts its operands to the stored dtype, as under autocast, reads them as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxtrain.passes.numerics.casts import LOWER_FLOATS, to_dtype
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, follow, is_followed, moves, used


def is_stored_low(x: Any, dtype: Any) -> bool:
    """Return whether an array has a lower precision than a computation in `dtype`, which represents it exactly."""
    return getattr(x, "dtype", None) in LOWER_FLOATS and _contains_lower_floats(dtype)


def convert_where_used(compute: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """Let a function `compute(params, …)` of parameters in `dtype` take some of them in lower precision.

    Args:
      compute: The function. It is not differentiated with respect to such parameters.
      dtype: Dtype of the parameters that it is written for.

    Returns:
      A function with the results of `compute` for the converted parameters. The backward pass keeps them as they are
      stored. Without any of lower precision, `compute` itself is called.

    Example:
      >>> params = jnp.ones((3, 2, 2), jnp.bfloat16)
      >>> def layers(params, x):
      ...     return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params)[0]
      >>> x = jnp.ones((1, 2))
      >>> stored = convert_where_used(layers, np.float32)
      >>> bool((stored(params, x) == layers(params.astype(np.float32), x)).all())
      True
      >>> "f32[3,2,2]" in str(jax.make_jaxpr(stored)(params, x))
      False
    """

    def computed(params: Any, *rest: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        low = [is_stored_low(x, dtype) for x in leaves]
        if not any(low):
            return compute(params, *rest)

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            given = [_Stored(x, np.dtype(dtype)) if is_low else x for x, is_low in zip(leaves, low, strict=True)]
            return follow(_rule)(closed.jaxpr, closed.consts, [*given, *values[len(leaves) :]])

        like = [jax.ShapeDtypeStruct(x.shape, dtype) if is_low else x for x, is_low in zip(leaves, low, strict=True)]
        return rewrite.retrace(compute, evaluate)(jax.tree.unflatten(structure, like), *rest)

    return computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Stored(Followed):
    """An array that stands for its conversion to a dtype."""

    array: Any
    dtype: Any = field(metadata={"static": True})

    @property
    def is_exact(self) -> bool:
        return self.array.dtype == self.dtype or _contains_lower_floats(self.dtype)

    def used(self) -> Any:
        return to_dtype(self.dtype, self.array)

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> Any:
        name = op.of(eqn)
        if name == op.CONVERT_ELEMENT_TYPE and self.is_exact and jnp.issubdtype(equations.dtype(eqn), np.floating):
            return _Stored(self.array, equations.dtype(eqn))
        return _Stored(apply(self.array), self.dtype) if moves(eqn) or name == op.GATHER else None


def _contains_lower_floats(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize > 2


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if op.of(eqn) in op.PRODUCTS - {op.RAGGED_DOT_GENERAL} and any(
        is_followed(x) and x.array.dtype != x.dtype for x in args
    ):
        # The backward pass converts again: it would keep the converted operand of every layer.
        return jax.checkpoint(lambda *args: rewrite.bind(eqn, [*map(used, args)]))(*args)
    return None
