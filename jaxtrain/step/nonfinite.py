"""Where a window's gradient first stopped being finite: in which micro-batch, and there in which parameter.

Squares are summed to find out: these sums are the gradient norm's, so that the compiler makes them once. Only where one
of them is not finite are the elements looked at, for it may have overflowed. `measured`, where it is given, is what the
norm is wanted of anyway: the gradient times something, finite only where the gradient is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxtrain.paths import path_name


class Nonfinite(NamedTuple):
    """`micro_batch` int32[], of the window; `leaf` int32[], of the gradient's leaves in order; −1 where none is."""

    micro_batch: jax.Array
    leaf: jax.Array


def nowhere() -> Nonfinite:
    """Everything is finite so far."""
    return Nonfinite(jnp.full([], -1, np.int32), jnp.full([], -1, np.int32))


def locate(grads: Any, micro_batch: jax.Array | int, measured: Any = None) -> Nonfinite:
    """The first leaf of a micro-batch's gradient that holds an inf or a NaN.

    >>> found = locate({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}, micro_batch=3)
    >>> int(found.micro_batch), int(found.leaf)
    (3, 1)
    """

    def found() -> Nonfinite:
        finite = finite_leaves(grads)
        first = Nonfinite(jnp.asarray(micro_batch, np.int32), jnp.argmin(finite).astype(np.int32))
        return _choose(jnp.all(finite), nowhere(), first)

    return lax.cond(_finite_norm(grads, measured), nowhere, found)


def all_finite(grads: Any, measured: Any = None) -> jax.Array:
    """bool[]: whether no leaf holds an inf or a NaN."""
    return lax.cond(_finite_norm(grads, measured), lambda: jnp.array(True), lambda: jnp.all(finite_leaves(grads)))


def finite_leaves(grads: Any) -> jax.Array:
    """bool[number of leaves]: which hold neither inf nor NaN."""
    return jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])


def earlier(first: Nonfinite, second: Nonfinite) -> Nonfinite:
    """`first`, or `second` where there is none."""
    return _choose(first.leaf >= 0, first, second)


def leaf_name(params: Any, leaf: int) -> str:
    """The path of the `leaf`-th of the trained parameters, as a metric gives it.

    >>> leaf_name({"head": {"bias": 0.0, "kernel": 0.0}}, 1)
    'head/kernel'
    """
    return path_name(jax.tree_util.tree_leaves_with_path(params)[leaf][0])


def _finite_norm(grads: Any, measured: Any) -> jax.Array:
    return jnp.isfinite(optax.tree.norm(grads if measured is None else measured))


def _choose(condition: jax.Array, a: Nonfinite, b: Nonfinite) -> Nonfinite:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
