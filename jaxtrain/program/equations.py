"""What an equation of a jaxpr says, whatever the version of JAX calls it.

`rewrite.py` builds equations of control flow anew, and reads their further parameters for it. No other file reads them
(`tests/test_architecture.py`); `internals.py` has a probe for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxtrain.program import operations as op

_Function = TypeVar("_Function")


def of(jaxpr: Any) -> Sequence[JaxprEqn]:
    """Return the equations of a jaxpr, closed or not, without those inside them."""
    eqns: Sequence[JaxprEqn] = jaxpr.eqns
    return eqns


def sole(jaxpr: Any) -> JaxprEqn | None:
    """Return the only equation of a jaxpr; None if it has none or several."""
    return jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None


def producers(jaxpr: Any) -> dict[Var, JaxprEqn]:
    """Return the equations of a jaxpr by the variables that they compute."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def reads(jaxpr: Jaxpr) -> Iterator[Var]:
    """Yield the variables that the equations of a jaxpr read, and those that are its results, as often as they are."""
    yield from (v for v in (*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)) if isinstance(v, Var))


def saves(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Return whether a policy of `jax.checkpoint` saves the results of an equation."""
    return bool(policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params))


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among an equation's parameters, and that of an operation of `jax.experimental.hijax`."""
    if op.of(eqn) == op.CALL_HI_PRIMITIVE:
        operation = eqn.params["_prim"]
        return [jax.make_jaxpr(operation.expand)(*operation.in_avals).jaxpr]
    params = [p for value in eqn.params.values() for p in (value if isinstance(value, tuple) else (value,))]
    return [p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in params if isinstance(p, (ClosedJaxpr, Jaxpr))]


def within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield an equation, and then every equation inside it."""
    yield eqn
    for inner in inner_jaxprs(eqn):
        yield from visit(inner)


def visit(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation of a jaxpr, each before those inside it.

    >>> traced = jax.make_jaxpr(jax.jit(lambda x: jax.numpy.sin(x) + 1))(1.0)
    >>> [eqn.primitive.name for eqn in visit(traced.jaxpr)]
    ['jit', 'sin', 'add']
    """
    for eqn in jaxpr.eqns:
        yield from within(eqn)


def nested(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Yield a jaxpr and every jaxpr inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            yield from nested(inner)


def in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Return whether the equation, or the one it differentiates, was traced under `jax.named_scope(name)`."""
    return any(part.name == name for part in eqn.source_info.name_stack.stack)


def is_call(eqn: JaxprEqn, name: str) -> bool:
    """Return whether the equation calls a jitted function of that name."""
    return eqn.params.get("name") == name and op.of(eqn) in op.CALLS


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


def body(eqn: JaxprEqn) -> Any:
    """Return the jaxpr, closed or not, that an equation applies to its operands, or a scan repeats."""
    return next(eqn.params[key] for key in ("call_jaxpr", "jaxpr", "call") if key in eqn.params)


def label(eqn: JaxprEqn) -> str:
    """Return the name of the function that an equation calls, or of the value that it names; "" if there is none."""
    name = eqn.params.get("name", "")
    return name if isinstance(name, str) else ""


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of its carries."""
    if "ft_in" in eqn.params:  # since JAX 0.11: three flat trees
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_operands(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the constants of a scan, its carry and what it slices, of its operands."""
    n_consts, n_carry = scan_sizes(eqn)
    return [*args[:n_consts]], [*args[n_consts : n_consts + n_carry]], [*args[n_consts + n_carry :]]


def is_carry(eqn: JaxprEqn, i: int) -> bool:
    """Return whether operand i of a scan is a part of its carry."""
    n_consts, n_carry = scan_sizes(eqn)
    return n_consts <= i < n_consts + n_carry


def trip_count(eqn: JaxprEqn) -> int:
    """Return the number of steps of a scan."""
    return int(eqn.params["length"])


def is_reversed(eqn: JaxprEqn) -> bool:
    """Return whether a scan begins with the last slices."""
    return bool(eqn.params["reverse"])


def loop_options(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the options of `lax.scan` that a scan has."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


class While(NamedTuple):
    """A while loop. Its operands are the constants of the condition, those of the body, and the carry."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    n_condition: int
    n_body: int


def while_loop(eqn: JaxprEqn) -> While:
    """Return the parts of a while loop."""
    params = eqn.params
    return While(params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"])


def branches(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """Return the branches of a condition, whose first operand is the number of the one that is taken."""
    return tuple(eqn.params["branches"])


def platforms_of_branches(eqn: JaxprEqn) -> Sequence[Sequence[str] | None] | None:
    """Return the platforms of each branch of `lax.platform_dependent`; None for another condition."""
    platforms: Sequence[Sequence[str] | None] | None = eqn.params.get("branches_platforms")
    return platforms


def contraction(eqn: JaxprEqn) -> Any:
    """Return the axes of a product, a convolution or a gather, as `lax.dot_general` and its like take them."""
    names = ("dimension_numbers", "ragged_dot_dimension_numbers")
    return next(eqn.params[name] for name in names if name in eqn.params)


def precision(eqn: JaxprEqn) -> Any:
    """Return the precision that a product asks for; None for the default one."""
    return eqn.params.get("precision")


def accumulated_in(eqn: JaxprEqn) -> Any:
    """Return the dtype of the result that a product asks for; None for that of its operands."""
    return eqn.params["preferred_element_type"]


class Window(NamedTuple):
    """Where a convolution applies its kernel, as `lax.conv_general_dilated` takes it."""

    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    lhs_dilation: Sequence[int]
    rhs_dilation: Sequence[int]
    feature_groups: int
    batch_groups: int


def window(eqn: JaxprEqn) -> Window:
    """Return where a convolution applies its kernel."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    return Window(*(eqn.params[name] for name in names))


def is_plain_reshape(eqn: JaxprEqn) -> bool:
    """Return whether a reshape keeps the order of elements and gives its result no sharding."""
    return eqn.params["dimensions"] is None and eqn.params["sharding"] is None


class Split(NamedTuple):
    """An axis and the sizes of its parts."""

    axis: int
    sizes: tuple[int, ...]


def split_of(eqn: JaxprEqn) -> Split:
    """Return what a split divides."""
    return Split(eqn.params["axis"], eqn.params["sizes"])


def dtype(eqn: JaxprEqn) -> np.dtype[Any]:
    """Return the dtype that an equation converts to."""
    return np.dtype(eqn.params["new_dtype"])


def permutation(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the axis of the operand that each axis of a transpose is."""
    return tuple(eqn.params["permutation"])


def axes(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the axes that a reduction or a squeeze removes, or of a broadcast's result those of the operand."""
    names = ("axes", "broadcast_dimensions", "dimensions")
    return tuple(next(eqn.params[name] for name in names if name in eqn.params))


def sharding(eqn: JaxprEqn) -> Any:
    """Return the sharding that an equation gives its result; None without one."""
    return eqn.params.get("sharding")


def shardings(eqn: JaxprEqn, side: Literal["in_shardings", "out_shardings"]) -> list[jax.sharding.Sharding | None]:
    """Return the shardings that a jitted function asks of its operands or results; none of other equations."""
    return [x if isinstance(x, jax.sharding.Sharding) else None for x in eqn.params.get(side, ())]


class ShardMap(NamedTuple):
    """The options of `jax.shard_map`."""

    mesh: Any
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    check_vma: bool


def shard_map_options(eqn: JaxprEqn) -> ShardMap:
    """Return the options of a `shard_map`, but for its axes (`internals.manual_axes`)."""
    return ShardMap(*(eqn.params[name] for name in ShardMap._fields))


def prevents_cse(eqn: JaxprEqn) -> bool:
    """Return whether a checkpoint keeps the compiler from merging what it computes again."""
    return bool(eqn.params["prevent_cse"])


def is_opaque(eqn: JaxprEqn) -> bool:
    """Return whether only JAX knows what the derivative of a `custom_vjp` receives."""
    return bool(eqn.params["symbolic_zeros"] or eqn.params["num_consts"])


def hijax_operation(eqn: JaxprEqn) -> str:
    """Return the name of an operation of `jax.experimental.hijax`."""
    return type(eqn.params["_prim"]).__name__


def params(eqn: JaxprEqn) -> Mapping[str, Any]:
    """Return all parameters of an equation, to compare them, or to apply its primitive."""
    return eqn.params


def own(eqn: JaxprEqn, name: str) -> Any:
    """Return a parameter of a primitive of this project."""
    return eqn.params[name]


def with_params(eqn: JaxprEqn, **changes: Any) -> JaxprEqn:
    """Return an equation with other parameters."""
    return eqn.replace(params={**eqn.params, **changes})


def map_params(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Return an equation with each of its parameters changed."""
    return eqn.replace(params={name: change(x) for name, x in eqn.params.items()})
