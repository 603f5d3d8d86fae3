"""Gradients of a window as partial sums on a mesh: one for each group of devices, added after the last micro-batch."""

from typing import Any

import jax

from jaxtrain.transforms import Groups, Partial


def zero_sums(trained: Any, groups: Groups) -> Any:
    """Return zeros [groups, …] for every trained parameter, None for the others."""
    return groups.zeros(trained)


def with_sums(params: Any, sums: Any) -> Any:
    """Join the parameters with the partial sums of those that are trained."""
    return jax.tree.map(lambda x, s: x if s is None else Partial(x, s), params, sums, is_leaf=lambda x: x is None)


def divides_rows(window: Any, groups: int) -> bool:
    """Return whether the arrays of a window, [k, B, …], have the same rows, which the groups divide."""
    counts = {x.shape[1] for x in jax.tree.leaves(window)}
    return len(counts) == 1 and counts.pop() % groups == 0
