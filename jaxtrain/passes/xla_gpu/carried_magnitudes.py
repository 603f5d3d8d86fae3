"""Measure what a scan hands to its next step where it is computed.

The backward pass of a layer scales the gradient that it receives, and reads all of it for that. The layer after it had
the gradient at hand when it computed it: the largest magnitude becomes a value that the scan carries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.fp8.scales import AMAX, amax_of_all
from jaxtrain.passes.xla_gpu.added_products import FUSED_BEHIND
from jaxtrain.program import equations, rewrite

_Measured = tuple[int, Any]
"""The index of a carried value, and the dtype in which it is measured."""

Inlined = Callable[[JaxprEqn], tuple[Jaxpr, Sequence[Any]] | None]
"""Returns the jaxpr and the constants of a call to look into; None for all other equations."""


def carry_magnitudes(eqn: JaxprEqn, args: list[Any], inlined: Inlined) -> list[Any]:
    """Evaluate a scan, which also carries the largest magnitudes of the values that its body measures first.

    Args:
      eqn: The scan.
      args: Its operands.
      inlined: The calls to look into.
    """
    n_consts, n_carry = equations.scan_sizes(eqn)
    body = equations.body(eqn)
    carried = {v: (i, v.aval.dtype) for i, v in enumerate(body.jaxpr.invars[n_consts : n_consts + n_carry])}
    measured = list(dict.fromkeys(_measured(body.jaxpr, carried, inlined)))
    if not measured:
        return rewrite.bind(eqn, args)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]

    def amax(carry: Sequence[Any]) -> list[jax.Array]:
        return [amax_of_all(carry[i].astype(dtype)) for i, dtype in measured]

    def step(carry: tuple[list[Any], list[Any]], x: list[Any]) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        values, magnitudes = carry
        known = dict(zip(measured, magnitudes, strict=True))
        rule = _rule(dict(enumerate(values)), known, inlined)
        outs = rewrite.interpret(body.jaxpr, body.consts, [*consts, *values, *x], rule)
        return (outs[:n_carry], amax(outs)), outs[n_carry:]

    options = equations.loop_options(eqn)
    (carry, _), ys = lax.scan(step, (init, amax(init)), xs, **options)
    return [*carry, *ys]


def _measured(traced: Jaxpr, carried: Mapping[Any, _Measured], inlined: Inlined) -> Iterator[_Measured]:
    """Yield the carried values that a jaxpr measures as a whole."""
    carried = dict(carried)
    for eqn in traced.eqns:
        if not eqn.invars or isinstance(eqn.invars[0], Literal):
            continue
        of_first = carried.get(eqn.invars[0])
        if of_first and eqn.primitive.name in FUSED_BEHIND:
            carried[eqn.outvars[0]] = of_first[0], eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
        elif of_first and is_amax_of_all(eqn):
            yield of_first
        elif (inner := inlined(eqn)) is not None:
            pairs = zip(inner[0].invars, eqn.invars, strict=True)
            of_inner = {v: carried[x] for v, x in pairs if not isinstance(x, Literal) and x in carried}
            yield from _measured(inner[0], of_inner, inlined)


def is_amax_of_all(eqn: JaxprEqn) -> bool:
    """Return whether an equation finds the largest magnitude of an array; a saved one is a result a second time."""
    is_one = equations.is_call(eqn, AMAX) and len(set(equations.body(eqn).jaxpr.outvars)) == 1
    return is_one and eqn.outvars[0].aval.size == 1  # type: ignore[attr-defined]


def _rule(carry: Mapping[int, Any], known: Mapping[_Measured, jax.Array], inlined: Inlined) -> rewrite.Rule:
    """Return the rule that reads the magnitudes of carried values."""
    carried = {id(x): (i, x.dtype) for i, x in carry.items()}
    alive = [*carry.values()]  # so that no other value has the id of one

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any]:
        found = carried.get(id(args[0])) if args else None
        if found in known and is_amax_of_all(eqn):
            return [known[found].reshape(v.aval.shape) for v in eqn.outvars]  # type: ignore[attr-defined,index]
        if (inner := inlined(eqn)) is not None:
            return run(*inner, args)
        outs = rewrite.bind(eqn, args)
        if found and eqn.primitive.name in FUSED_BEHIND:
            carried[id(outs[0])] = found[0], outs[0].dtype
            alive.append(outs[0])
        return outs

    return rule
