"""Parameters of which copies exist that are already gathered from other devices, in the dtype that the program uses.

The gradient by a copy is that by its parameter: PyTorch's `fully_shard` with `reshard_after_forward=False`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.passes.fp8.fp8_product import NAME as FP8_PRODUCT
from jaxtrain.passes.marks import DIVIDED_LOOKUP, GATHERED_COPY
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, constrained_to, enters, follow, uses

_OF_BOTH = op.LAYOUT - op.IDENTITIES - {op.DYNAMIC_SLICE}
"""Changes of the layout that a parameter and its copy both make."""


def used_dtypes(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the arguments of `compute(params, …)` to the dtype in which it uses each parameter.

    It is None for a parameter of which only single rows or a copy in 8 bits are used, and the parameter's own for one
    that is used in several.

    Example:
      >>> def compute(w, x):
      ...     return (x @ w["kernel"].astype(x.dtype)).astype(w["bias"].dtype) + w["bias"]
      >>> w = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((1, 2))}
      >>> {name: dtype.name for name, dtype in used_dtypes(compute)(w, jnp.ones((1, 2), jnp.bfloat16)).items()}
      {'bias': 'float32', 'kernel': 'bfloat16'}
    """

    def dtypes(params: Any, *rest: Any) -> Any:
        closed = rewrite.make_jaxpr(compute)(params, *rest)
        leaves, structure = jax.tree.flatten(params)
        found = [{*_uses(closed.jaxpr, v)} for v in closed.jaxpr.invars[: len(leaves)]]
        return jax.tree.unflatten(structure, [_one(used, x.dtype) for used, x in zip(found, leaves, strict=True)])

    return dtypes


def _one(used: set[Any], own: Any) -> Any:
    return None if not used else used.pop() if len(used) == 1 else own


def _uses(traced: Jaxpr, var: Any) -> Iterator[Any]:
    """Yield the dtypes in which a parameter is used, after one conversion at most."""

    def passes(eqn: JaxprEqn, i: int) -> bool:
        del i
        converts = op.of(eqn) == op.CONVERT_ELEMENT_TYPE and eqn.invars[0].aval.dtype == var.aval.dtype  # type: ignore[attr-defined]
        return converts or _is_constraint(eqn) or op.of(eqn) in _OF_BOTH

    def enters_call(eqn: JaxprEqn, i: int) -> bool:
        return enters(eqn, i) and not equations.is_call(eqn, DIVIDED_LOOKUP)

    for use in uses(traced, var, passes, enters_call):
        if use.eqn is None or not _takes_rows_or_copy(use.eqn, use.position):
            yield use.variable.aval.dtype


def _takes_rows_or_copy(eqn: JaxprEqn, i: int) -> bool:
    """Return whether an equation uses single rows of an operand only, or a copy in 8 bits."""
    takes_copy = op.of(eqn) == FP8_PRODUCT and i == 1 and equations.own(eqn, "is_copied")
    return takes_copy or equations.is_call(eqn, DIVIDED_LOOKUP)


def _is_constraint(eqn: JaxprEqn) -> bool:
    return constrained_to(eqn) is not None


def with_copies(compute: Callable[..., Any], copies: Any) -> Callable[..., Any]:
    """Let a function `compute(params, …)` use copies of parameters.

    Args:
      compute: The function.
      copies: Pytree like the parameters, of copies in the dtypes of `used_dtypes`; None for parameters without a copy.

    Returns:
      The same function.

    Example:
      >>> w, x = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
      >>> compute = with_copies(lambda w, x: (w * x).sum(), 10 * w)
      >>> jax.value_and_grad(compute)(w, x)
      (Array(110., dtype=float32), Array([3., 4.], dtype=float32))
    """

    def computed(params: Any, *rest: Any) -> Any:
        of_leaves = jax.tree.leaves(copies, is_leaf=lambda x: x is None)

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            given = [x if copy is None else _Gathered(x, copy) for x, copy in zip(values, of_leaves, strict=False)]
            return follow(_rule)(closed.jaxpr, closed.consts, [*given, *values[len(given) :]])

        return rewrite.retrace(compute, evaluate)(params, *rest)

    return computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Gathered(Followed):
    """A parameter and its copy."""

    value: jax.Array
    copy: jax.Array

    def used(self) -> jax.Array:
        """Return the copy; its gradient is the parameter's."""
        taken: jax.Array = _take(self.value, self.copy)
        return taken

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> Any:
        converts = op.of(eqn) == op.CONVERT_ELEMENT_TYPE and self.value.dtype != self.copy.dtype
        if _is_constraint(eqn) or (converts and self.copy.dtype == equations.dtype(eqn)):
            return _Gathered(apply(self.value), self.copy)
        return _Gathered(apply(self.value), apply(self.copy)) if op.of(eqn) in _OF_BOTH else None


def gathered_copy(value: jax.Array, copy: jax.Array) -> jax.Array:
    """Return the copy; its gradient is the parameter's."""
    if not jnp.issubdtype(value.dtype, np.inexact):
        return copy

    @jax.custom_vjp
    def take(value: jax.Array, copy: jax.Array) -> jax.Array:
        del value
        return copy

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, None]:
        return gradient.astype(value.dtype), None

    take.defvjp(lambda value, copy: (copy, None), backward)
    return take(value, copy)


_take = jax.jit(gathered_copy)
assert gathered_copy.__name__ == GATHERED_COPY


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    is_lookup = equations.is_call(eqn, DIVIDED_LOOKUP)
    return rewrite.apply(eqn, [args[0].value, *args[1:]], run) if is_lookup else None
