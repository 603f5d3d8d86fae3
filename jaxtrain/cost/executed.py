"""How often a program runs each of its equations."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.program import equations
from jaxtrain.program import operations as op

Executed = tuple[JaxprEqn, float, int]
"""An equation, the cost of one run, and the number of runs."""


def executed(jaxpr: Jaxpr, cost: Callable[[JaxprEqn], float], times: int = 1) -> Iterator[Executed]:
    """Yield the equations that a program runs `times` times, in place of those that contain them.

    A scan runs its body once per step, a `cond` its most expensive branch. A `while` loop, whose trip count is unknown,
    counts one iteration. `cost` is that of an equation without the jaxprs in its parameters.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jax.numpy.sin(c), None), -x, length=7)[0])(1.0)
    >>> [(eqn.primitive.name, times) for eqn, _, times in executed(traced.jaxpr, lambda eqn: 1)]
    [('neg', 1), ('sin', 7)]
    """
    for eqn in equations.of(jaxpr):
        name, own = op.of(eqn), cost(eqn)
        often = times * equations.trip_count(eqn) if name == op.SCAN else times
        inner = [[*executed(body, cost, often)] for body in equations.inner_jaxprs(eqn)]
        parts = max(inner, key=total) if name == op.COND else [*chain.from_iterable(inner)]
        # Reductions and sorts contain a jaxpr of two scalars, which costs less. Equal costs differ by rounding.
        if name in (op.SCAN, op.COND) or (inner and own * times <= (1 + 1e-9) * total(parts)):
            yield from parts
        else:
            yield eqn, own, times


def total(parts: Iterable[Executed]) -> float:
    """Return the cost of all runs."""
    return sum(cost * times for _, cost, times in parts)
