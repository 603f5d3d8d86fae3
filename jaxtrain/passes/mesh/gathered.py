"""Parameters of which copies exist that are already gathered from other devices, in the dtype that the program uses.

The gradient by a copy is that by its parameter: PyTorch's `fully_shard` with `reshard_after_forward=False`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.passes.fp8.product import NAME as FP8_PRODUCT
from jaxtrain.passes.marks import DIVIDED_LOOKUP, GATHERED_COPY
from jaxtrain.program import equations, rewrite

_LAYOUT = frozenset({"reshape", "transpose", "squeeze", "slice"})
_CALLS = frozenset({"jit", "pjit", "checkpoint", "remat2"})


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


def _uses(traced: Jaxpr, var: Any, is_converted: bool = False) -> Iterator[Any]:
    """Yield the dtypes in which a variable is used, after one conversion at most."""
    if any(out is var for out in traced.outvars):
        yield var.aval.dtype
    for eqn in traced.eqns:
        for i in (i for i, v in enumerate(eqn.invars) if v is var):
            name = eqn.primitive.name
            if equations.is_call(eqn, DIVIDED_LOOKUP) or (
                name == FP8_PRODUCT and i == 1 and equations.own(eqn, "is_copied")
            ):
                continue
            if name == "convert_element_type" and not is_converted:
                yield from _uses(traced, eqn.outvars[0], True)
            elif _constrains(eqn) or name in _LAYOUT:
                yield from _uses(traced, eqn.outvars[0], is_converted)
            elif name in _CALLS or (name == "scan" and not _is_carry(eqn, i)):
                (inner,) = equations.inner_jaxprs(eqn)
                yield from _uses(inner, inner.invars[i], is_converted)
            else:
                yield var.aval.dtype


def _constrains(eqn: JaxprEqn) -> bool:
    """Return whether an equation only constrains the sharding of its operand, perhaps with a gradient of its own."""
    body = [eqn] if eqn.primitive.name != "custom_vjp_call" else equations.body(eqn).jaxpr.eqns
    return [inner.primitive.name for inner in body] == ["sharding_constraint"]


def _is_carry(eqn: JaxprEqn, i: int) -> bool:
    n_consts, n_carry = equations.scan_sizes(eqn)
    return n_consts <= i < n_consts + n_carry


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
            return _run(closed.jaxpr, closed.consts, [*given, *values[len(given) :]])

        return rewrite.retrace(compute, evaluate)(params, *rest)

    return computed


class _Gathered(NamedTuple):
    """A parameter and its copy."""

    value: jax.Array
    copy: jax.Array

    def taken(self) -> jax.Array:
        """Return the copy; its gradient is the parameter's."""
        taken: jax.Array = _take(*self)
        return taken


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


def _run(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return [*map(_taken, rewrite.interpret(traced, consts, args, _rule))]


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if not any(isinstance(x, _Gathered) for x in args):
        return None
    name, first = eqn.primitive.name, args[0]
    if equations.is_call(eqn, DIVIDED_LOOKUP):
        return rewrite.HIGHER_ORDER[name](eqn, [first.value, *args[1:]], _run)
    if name in _CALLS:
        return rewrite.HIGHER_ORDER[name](eqn, args, _run)
    if name == "scan":
        args = [_taken(x) if _is_carry(eqn, i) else x for i, x in enumerate(args)]
        return rewrite.HIGHER_ORDER[name](eqn, args, _run)
    if name == "convert_element_type" and first.value.dtype != first.copy.dtype == equations.dtype(eqn):
        return [_Gathered(rewrite.bind(eqn, [first.value])[0], first.copy)]
    rebuild = rewrite.HIGHER_ORDER.get(name)
    if _constrains(eqn):
        (value,) = rewrite.bind(eqn, [first.value]) if rebuild is None else rebuild(eqn, [first.value], _run)
        return [_Gathered(value, first.copy)]
    if name in _LAYOUT:
        return [_Gathered(*(rewrite.bind(eqn, [x])[0] for x in first))]
    args = [*map(_taken, args)]
    return rewrite.bind(eqn, args) if rebuild is None else rebuild(eqn, args, _run)


def _taken(x: Any) -> Any:
    return x.taken() if isinstance(x, _Gathered) else x
