"""Sparse mixtures of experts: every token is computed by the experts that a router selected for it.

Tokens are sorted by expert, so that one grouped product (`jax.lax.ragged_dot`) applies the weights of all experts: no
token is dropped or padded. On a mesh, each device sorts its own tokens and, along the axis `expert`, sends them to the
devices that have their experts (`jaxtrain.distributed.experts`).
"""

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations, rewrite

Experts = Callable[..., jax.Array]
"""Applies experts to tokens [N, width] sorted by expert: `experts(tokens, group_sizes, *params) -> [N, width]`."""

_NAME = "routed_experts"
_MARKED: WeakValueDictionary[str, Experts] = WeakValueDictionary()  # by name in a jaxpr
_NUMBERS = itertools.count()


def routed_experts(experts: Experts, x: jax.Array, chosen: jax.Array, *params: jax.Array) -> jax.Array:
    """Apply to each token the experts that are chosen for it.

    Args:
      experts: A pure function of tokens [N, width] sorted by expert, `group_sizes` int32 [experts] and `params`, as a
        grouped product. Tokens after the last group may have any result. Autocast takes the whole for one operation of
        its low-precision list if tokens are exchanged.
      x: Tokens [..., width].
      chosen: Experts of each token, int32 [..., k], all different.
      *params: Parameters of the experts, [experts, ...].

    Returns:
      The outputs [..., k, width] of the experts.

    Example:
      >>> def linear(tokens, group_sizes, kernel):
      ...     return jax.lax.ragged_dot(tokens, kernel, group_sizes)
      >>> x, kernel = jnp.array([[1.0], [2.0]]), jnp.array([[[10.0]], [[100.0]]])
      >>> routed_experts(linear, x, jnp.array([[1], [0]]), kernel).ravel().tolist()
      [100.0, 20.0]
    """
    out: jax.Array = rewrite.jit_once(experts, _marked)(x, chosen, *params)
    return out


def find_routed_experts(eqn: JaxprEqn) -> Experts | None:
    """Return the experts of an equation of `routed_experts`; None for any other equation."""
    return equations.marked_function(eqn, _NAME, _MARKED, "experts whose function")


def compute_sorted(experts: Experts, x: jax.Array, chosen: jax.Array, *params: jax.Array) -> jax.Array:
    """Compute `routed_experts` on one device."""
    rows, order, group_sizes = sort_by_expert(x, chosen, params[0].shape[0])
    return in_order(experts(rows, group_sizes, *params), order, chosen.shape)


def sort_by_expert(x: jax.Array, chosen: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a row for each expert of each token, sorted by expert; the order; the number of rows of each expert."""
    of_rows = chosen.reshape(-1)
    order = jnp.argsort(of_rows)
    group_sizes = jnp.bincount(of_rows, length=count).astype(np.int32)
    return x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]], order, group_sizes


def in_order(rows: jax.Array, order: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return rows sorted by expert in the order of the tokens, [..., k, width]."""
    return rows[jnp.argsort(order)].reshape(*shape, -1)


def _marked(experts: Experts) -> Callable[..., jax.Array]:
    def routed(x: jax.Array, chosen: jax.Array, *params: jax.Array) -> jax.Array:
        return compute_sorted(experts, x, chosen, *params)

    routed.__name__ = f"{_NAME}_{next(_NUMBERS)}"
    _MARKED[routed.__name__] = experts
    return routed
