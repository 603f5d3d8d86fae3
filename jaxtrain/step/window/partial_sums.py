"""Gradients of a window as partial sums on a mesh: one for each group of devices, added once.

They are added after the last micro-batch, or within its backward pass (`jaxtrain.passes.mesh.window_sums`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.passes import Groups, LastPartial, Partial
from jaxtrain.step.accumulate import Window, add_loss, mean_of_sums, micro_batch_count
from jaxtrain.step.nonfinite import Nonfinite, earliest, location
from jaxtrain.step.objective import Loss


def zero_sums(trained: Any, groups: Groups) -> Any:
    """Return zeros [groups, …] for every trained parameter, None for the others."""
    return groups.zeros(trained)


def with_sums(params: Any, sums: Any, groups: Groups) -> Any:
    """Join the parameters with the partial sums of those that are trained."""

    def joined(x: Any, s: jax.Array | None) -> Any:
        return x if s is None else Partial(x, s, groups.of_sums(s))

    return jax.tree.map(joined, params, sums, is_leaf=lambda x: x is None)


def divides_rows(window: Any, groups: int) -> bool:
    """Return whether the arrays of a window, [k, B, …], have the same rows, which the groups divide."""
    counts = {x.shape[1] for x in jax.tree.leaves(window)}
    return len(counts) == 1 and counts.pop() % groups == 0


class Total(NamedTuple):
    """Zeros for a parameter, by which the gradient is the sum of a window: the fields of `LastPartial`."""

    total: jax.Array
    nonfinite: jax.Array


def zero_totals(window: Window, groups: Groups) -> Any:
    """Return a `Total` for every trained parameter, None for the others."""

    def zeros(sums: jax.Array) -> Total:
        nonfinite = groups.of_sums(sums).shard(jnp.zeros(sums.shape[:1], sums.dtype))
        return Total(jnp.zeros(sums.shape[1:], sums.dtype), nonfinite)

    return jax.tree.map(zeros, window.sums.acc_grads)


def with_totals(params: Any, totals: Any, window: Window, factor: jax.Array, groups: Groups) -> Any:
    """Join the parameters with the sums of the window so far, to which its last gradient times `factor` is added."""

    def joined(x: Any, zeros: Total | None, earlier: Any, sharding: Any) -> Any:
        return x if zeros is None else LastPartial(x, *zeros, earlier, factor, groups.of_sums(earlier), sharding)

    return jax.tree.map(joined, params, totals, window.sums.acc_grads, groups.shardings(params))


def add_last(window: Window, totals: Any, loss: Loss) -> tuple[Any, Loss, Nonfinite]:
    """Return the gradient of the window's mean loss, its summed loss, and the location of its first inf or NaN.

    Args:
      window: The window without its last micro-batch.
      totals: The gradient by `zero_totals`.
      loss: The last micro-batch's summed loss and weight.
    """
    leaves = jax.tree.leaves(totals, is_leaf=lambda x: isinstance(x, Total))
    finite = jnp.array([(x.nonfinite == 0).all() for x in leaves], bool)
    sums = jax.tree.map(lambda x: x.total, totals, is_leaf=lambda x: isinstance(x, Total))
    whole = add_loss(window.loss, loss)
    nonfinite = earliest(window.nonfinite, location(finite, micro_batch_count(window)))
    return mean_of_sums(sums, whole.weight), whole, nonfinite
