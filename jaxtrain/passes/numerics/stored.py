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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.passes.numerics.casts import LOWER_FLOATS, to_dtype
from jaxtrain.program import equations, rewrite

_CALLS = frozenset({"jit", "pjit", "checkpoint", "remat2", "scan"})
# Of the first operand; the others are indices.
_LAYOUT = frozenset({"dynamic_slice", "gather", "reshape", "sharding_constraint", "slice", "squeeze", "transpose"})
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})


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
            return _run(closed.jaxpr, closed.consts, [*given, *values[len(leaves) :]])

        like = [jax.ShapeDtypeStruct(x.shape, dtype) if is_low else x for x, is_low in zip(leaves, low, strict=True)]
        return rewrite.retrace(compute, evaluate)(jax.tree.unflatten(structure, like), *rest)

    return computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Stored:
    """An array that stands for its conversion to a dtype; a pytree, so that scans slice it by layer."""

    array: Any
    dtype: Any = field(metadata={"static": True})

    @property
    def is_exact(self) -> bool:
        return self.array.dtype == self.dtype or _contains_lower_floats(self.dtype)

    def converted(self) -> Any:
        return to_dtype(self.dtype, self.array)


def _contains_lower_floats(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize > 2


def _converted(x: Any) -> Any:
    return x.converted() if isinstance(x, _Stored) else x


def _run(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return [*map(_converted, rewrite.interpret(traced, consts, args, _rule))]


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if not any(isinstance(x, _Stored) for x in args):
        return None
    name = eqn.primitive.name
    if name == "scan":
        n_consts, n_carry = equations.scan_sizes(eqn)
        args[n_consts : n_consts + n_carry] = map(_converted, args[n_consts : n_consts + n_carry])
    if name in _CALLS:
        return rewrite.HIGHER_ORDER[name](eqn, args, _run)
    first = args[0]
    if name in _LAYOUT and isinstance(first, _Stored) and not any(isinstance(x, _Stored) for x in args[1:]):
        return [_Stored(rewrite.bind(eqn, [first.array, *args[1:]])[0], first.dtype)]
    if name == "convert_element_type" and first.is_exact and jnp.issubdtype(equations.dtype(eqn), np.floating):
        return [_Stored(first.array, np.dtype(equations.dtype(eqn)))]
    if name in _PRODUCTS and any(isinstance(x, _Stored) and x.array.dtype != x.dtype for x in args):
        # The backward pass converts again: it would keep the converted operand of every layer.
        return jax.checkpoint(lambda *args: rewrite.bind(eqn, [*map(_converted, args)]))(*args)
    rebuild = rewrite.HIGHER_ORDER.get(name)
    args = [*map(_converted, args)]
    return rewrite.bind(eqn, args) if rebuild is None else rebuild(eqn, args, _run)
