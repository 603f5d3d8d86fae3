"""Location of the first inf or NaN of a window's gradient: its micro-batch and its parameter.

On CPUs, where another pass over the gradient is slow, the elements are inspected only if the gradient norm, which is
computed anyway, is not finite: a norm may also overflow. On GPUs a branch would make the host wait for the device; the
elements are always inspected there, in a pass over the gradient that the program makes anyway. `norm` is the norm that
is computed anyway: that of the gradient times a factor, finite only where the gradient is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxtrain.paths import path_name


class Nonfinite(NamedTuple):
    """Location of the first inf or NaN.

    Attributes:
      micro_batch: int32[], index of the micro-batch in its window; −1 if everything is finite.
      leaf: int32[], index among the gradient's leaves; −1 if everything is finite.
    """

    micro_batch: jax.Array
    leaf: jax.Array


def none_nonfinite() -> Nonfinite:
    """Return the location that stands for a finite gradient."""
    return Nonfinite(jnp.full([], -1, np.int32), jnp.full([], -1, np.int32))


def locate_nonfinite(grads: Any, micro_batch: jax.Array | int, norm: jax.Array | None = None) -> Nonfinite:
    """Locate the first leaf of a micro-batch's gradient that holds an inf or a NaN.

    >>> location = locate_nonfinite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}, micro_batch=3)
    >>> int(location.micro_batch), int(location.leaf)
    (3, 1)
    """
    return location(_finite_gradients(grads, norm), micro_batch)


def location(finite: jax.Array, micro_batch: jax.Array | int) -> Nonfinite:
    """Return the location of the first leaf of a micro-batch's gradient that is not finite, of bool[leaves]."""
    first = Nonfinite(jnp.asarray(micro_batch, np.int32), jnp.argmin(finite).astype(np.int32))
    return _select(jnp.all(finite), none_nonfinite(), first)


def all_finite(grads: Any, norm: jax.Array | None = None) -> jax.Array:
    """Return whether no leaf holds an inf or a NaN, bool[]."""
    return jnp.all(_finite_gradients(grads, norm))


def finite_leaves(tree: Any) -> jax.Array:
    """Return which leaves hold neither inf nor NaN, bool[number of leaves]."""
    return jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], bool)


def earliest(first: Nonfinite, second: Nonfinite) -> Nonfinite:
    """Return `first`, or `second` if `first` is no location."""
    return _select(first.leaf >= 0, first, second)


def first_nonfinite(finite: jax.Array) -> Nonfinite:
    """Return the location of the first gradient that is not finite, of bool[micro-batches, leaves].

    >>> location = first_nonfinite(jnp.array([[True, True], [True, False]]))
    >>> int(location.micro_batch), int(location.leaf)
    (1, 1)
    """
    first = jnp.argmin(finite.all(1))
    location = Nonfinite(first.astype(np.int32), jnp.argmin(finite[first]).astype(np.int32))
    return _select(finite.all(), none_nonfinite(), location)


def leaf_name(params: Any, leaf: int) -> str:
    """Return the path of a trained parameter, from the metric `nonfinite_leaf`.

    Args:
      params: Pytree of the trained parameters.
      leaf: Index of the leaf.

    Returns:
      The leaf's path, as in "blocks/qkv/kernel".

    Example:
      >>> leaf_name({"head": {"bias": 0.0, "kernel": 0.0}}, 1)
      'head/kernel'
    """
    return path_name(jax.tree_util.tree_leaves_with_path(params)[leaf][0])


def _finite_gradients(grads: Any, norm: jax.Array | None) -> jax.Array:
    """Return which leaves are finite, in the way that is fast on the platform compiled for."""
    leaves = jax.tree.leaves(grads)

    def inspect_if_needed(norm: jax.Array) -> jax.Array:
        return lax.cond(jnp.isfinite(norm), lambda: jnp.ones(len(leaves), bool), lambda: finite_leaves(leaves))

    norm = optax.tree.norm(leaves) if norm is None else norm
    finite: jax.Array = lax.platform_dependent(norm, cpu=inspect_if_needed, default=lambda norm: finite_leaves(leaves))
    return finite


def _select(condition: jax.Array, a: Nonfinite, b: Nonfinite) -> Nonfinite:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
