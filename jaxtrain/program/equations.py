"""What an equation of a jaxpr says: the only file that reads the parameters of JAX's equations."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_Function = TypeVar("_Function")

CALLS = ("jit", "pjit")
"""Primitives that call a jitted function."""

EVALUATIONS = ("eval_jaxpr", "closed_call", "call", "composite", "custom_vmap_call")
"""Primitives that apply a jaxpr to their operands, without a boundary of its own: what differentiation splits off a
checkpoint ("closed_call", since JAX 0.12 "eval_jaxpr"), and functions with a rule for other compilers or for `vmap`."""

APPLICATIONS = frozenset(
    {*CALLS, *EVALUATIONS, "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"},
)
"""Primitives whose results are those of one jaxpr, applied to the same operands."""

HIJAX = "call_hi_primitive"
"""The primitive of all operations of `jax.experimental.hijax`, such as `lax.custom_root` since JAX 0.12."""


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters, and that of an operation of `jax.experimental.hijax`."""
    if eqn.primitive.name == HIJAX:
        operation = eqn.params["_prim"]
        return [jax.make_jaxpr(operation.expand)(*operation.in_avals).jaxpr]
    params = [p for value in eqn.params.values() for p in (value if isinstance(value, tuple) else (value,))]
    return [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in params if isinstance(p, (ClosedJaxpr, Jaxpr))]


def in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Return whether the equation, or the one it differentiates, was traced under `jax.named_scope(name)`."""
    return any(part.name == name for part in eqn.source_info.name_stack.stack)


def is_call(eqn: JaxprEqn, name: str) -> bool:
    """Return whether the equation calls a jitted function of that name."""
    return eqn.params.get("name") == name and eqn.primitive.name in ("jit", "pjit")


def marked_function(eqn: JaxprEqn, prefix: str, functions: Mapping[str, _Function], what: str) -> _Function | None:
    """Return the function that is registered for a jitted function whose name has a prefix; None for others.

    Args:
      eqn: The equation.
      prefix: What the names of jitted functions of this kind begin with.
      functions: The registered functions, by the name of the jitted one.
      what: What a program contains whose function no longer exists.

    Raises:
      RuntimeError: The function no longer exists.
    """
    name = eqn.params.get("name", "")
    if not (isinstance(name, str) and name.startswith(prefix) and is_call(eqn, name)):
        return None
    if name not in functions:
        raise RuntimeError(f"a program contains {what} no longer exists: keep a reference to it")
    return functions[name]


def called_jaxpr(eqn: JaxprEqn) -> Any:
    """Return the jaxpr, closed or not, that an equation of `APPLICATIONS` applies to its operands."""
    return next(eqn.params[key] for key in ("call_jaxpr", "jaxpr", "call") if key in eqn.params)


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of its carries."""
    if "ft_in" in eqn.params:  # since JAX 0.11: three flat trees
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]
