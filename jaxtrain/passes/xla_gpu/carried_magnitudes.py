"""Measure what a scan hands to its next step where it is computed.

The backward pass of a layer scales the gradient that it receives, and reads all of it for that. The layer after it had
the gradient at hand when it computed it: the largest magnitude becomes a value that the scan carries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.passes.fp8.scales import AMAX, amax_of_all
from jaxtrain.passes.xla_gpu.added_products import FUSED_BEHIND
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, is_followed, moved_or_used, used, uses

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
    body = equations.body(eqn)
    measured = list(dict.fromkeys(_measured(body.jaxpr, equations.scan_operands(eqn, body.jaxpr.invars)[1], inlined)))
    if not measured:
        return rewrite.bind(eqn, args)
    consts, init, xs = equations.scan_operands(eqn, args)

    def amax(carry: Sequence[Any]) -> list[jax.Array]:
        return [amax_of_all(carry[i].astype(dtype)) for i, dtype in measured]

    def step(carry: tuple[list[Any], list[Any]], x: list[Any]) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
        values, magnitudes = map(_Carried, range(len(init)), carry[0]), carry[1]
        rule = _rule(dict(zip(measured, magnitudes, strict=True)), inlined)
        outs = [*map(used, rewrite.interpret(body.jaxpr, body.consts, [*consts, *values, *x], rule))]
        return (outs[: len(init)], amax(outs)), outs[len(init) :]

    options = equations.loop_options(eqn)
    (carry, _), ys = lax.scan(step, (init, amax(init)), xs, **options)
    return [*carry, *ys]


def _measured(traced: Jaxpr, carry: Sequence[Any], inlined: Inlined) -> Iterator[_Measured]:
    """Yield the variables of a carry that a jaxpr measures as a whole."""
    for number, variable in enumerate(carry):
        found = uses(traced, variable, lambda eqn, i: _keeps(eqn), lambda eqn, i: inlined(eqn) is not None)
        yield from ((number, x.variable.aval.dtype) for x in found if x.eqn is not None and is_amax_of_all(x.eqn))


def is_amax_of_all(eqn: JaxprEqn) -> bool:
    """Return whether an equation finds the largest magnitude of an array; a saved one is a result a second time."""
    is_one = equations.is_call(eqn, AMAX) and len(set(equations.body(eqn).jaxpr.outvars)) == 1
    return is_one and eqn.outvars[0].aval.size == 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Carried(Followed):
    """A value of a carry, by its index."""

    index: int
    value: Any

    def used(self) -> Any:
        return self.value

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> "_Carried | None":
        return _Carried(self.index, apply(self.value)) if _keeps(eqn) else None


def _keeps(eqn: JaxprEqn) -> bool:
    return op.of(eqn) in FUSED_BEHIND


def _rule(known: Mapping[_Measured, jax.Array], inlined: Inlined) -> rewrite.Rule:
    """Return the rule that reads the magnitudes of carried values."""

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any]:
        found = known.get((args[0].index, args[0].value.dtype)) if args and is_followed(args[0]) else None
        if found is not None and is_amax_of_all(eqn):
            return [found.reshape(v.aval.shape) for v in eqn.outvars]  # type: ignore[attr-defined]
        if (inner := inlined(eqn)) is not None:
            return run(*inner, args)
        return moved_or_used(eqn, args, rewrite.bind)

    return rule
