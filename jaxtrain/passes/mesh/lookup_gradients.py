"""Gradients of tables as sums that are added over the devices of a mesh once.

A table may be used twice: rows are looked up, and a tied head multiplies by it. The compiler may reduce the gradients
of both uses before it adds them.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.passes.marks import GATHERED_COPY, looks_up
from jaxtrain.passes.mesh.gradient_groups import Groups, Partial
from jaxtrain.passes.mesh.partial_gradients import evaluate_by_group, row_counts
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import uses


def lookup_gradients(compute: Callable[..., Any], groups: Groups) -> Callable[..., Any]:
    """Compute the gradients of the tables of a function `compute(params, batch, …)` by group, and add them once.

    Args:
      compute: The function.
      groups: The groups of rows.

    Returns:
      A function with the signature, the results and the gradients of `compute`.

    Example:
      >>> def compute(table, tokens):
      ...     return (table[tokens] @ table.T).sum()
      >>> table, tokens = jnp.array([[1.0], [2.0]]), jnp.array([0, 1, 1, 1])
      >>> by_group = lookup_gradients(compute, Groups(("data",), (2,)))
      >>> jax.grad(by_group)(table, tokens).ravel().tolist(), jax.grad(compute)(table, tokens).ravel().tolist()
      ([10.0, 16.0], [10.0, 16.0])
    """

    @jax.custom_vjp
    def zeros(tables: Any) -> Any:
        return groups.zeros(tables)

    zeros.defvjp(lambda tables: (groups.zeros(tables), None), lambda _, sums: (groups.add(sums),))

    def computed(params: Any, *rest: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        counts = row_counts(rest[:1])

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            params, others = values[: len(leaves)], values[len(leaves) :]
            used = zip(params, closed.jaxpr.invars, strict=False)
            tables = [x if _is_table(closed.jaxpr, v, counts) else None for x, v in used]
            sums = jax.tree.leaves(zeros(jax.tree.unflatten(structure, tables)), is_leaf=lambda x: x is None)
            by_group = [x if s is None else Partial(x, s, groups.of_sums(s)) for x, s in zip(params, sums, strict=True)]
            return evaluate_by_group(closed, [*by_group, *others], counts)

        return rewrite.retrace(compute, evaluate)(params, *rest)

    return computed


def _is_table(traced: Jaxpr, var: Any, counts: Collection[int]) -> bool:
    """Return whether a program looks up rows of a parameter by an array of a batch, which has these numbers of rows."""
    if not jnp.issubdtype(var.aval.dtype, np.inexact):
        return False

    def passes(eqn: JaxprEqn, i: int) -> bool:
        del i
        is_unchanged = op.of(eqn) in (op.CONVERT_ELEMENT_TYPE, op.SHARDING_CONSTRAINT)
        return is_unchanged or equations.is_call(eqn, GATHERED_COPY)

    def enters(eqn: JaxprEqn, i: int) -> bool:
        is_called = op.of(eqn) in op.FUNCTIONS or op.of(eqn) == op.CUSTOM_JVP_CALL
        return is_called and not looks_up(eqn, i)

    found = (use.eqn for use in uses(traced, var, passes, enters) if use.eqn and looks_up(use.eqn, use.position))
    indices: Iterator[Any] = (eqn.invars[1].aval for eqn in found)
    return any(x.ndim and x.shape[0] in counts for x in indices)
