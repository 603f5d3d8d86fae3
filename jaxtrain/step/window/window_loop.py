"""The loop over the micro-batches of a window."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LONGEST = 31
"""Micro-batches of the longest window whose loops over layers are pipelined."""


def scan_window(
    body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int, *, pipelines_layers: bool
) -> tuple[Any, Any]:
    """As `lax.scan`; optionally written such that XLA does not pipeline this loop, but those within it.

    XLA pipelines loops whose counter is increased by a constant, from the innermost one outwards. A pipelined loop has
    no length that XLA knows if its body has loops, and the host waits for the device before each iteration. The counter
    here is a bit that is shifted until it is 0: its steps are counted by evaluating them.

    Args:
      body: From (carry, element of xs) to (carry, element of the results).
      init: The first carry.
      xs: Arrays [length, …].
      length: The number of iterations.
      pipelines_layers: Whether XLA is to pipeline only the loops within it; of at most `LONGEST` iterations.

    Returns:
      The last carry and the stacked results.

    Example:
      >>> numbers = jnp.arange(4.0)
      >>> scan_window(lambda total, x: (total + x, x * x), 0.0, numbers, 4, pipelines_layers=True)
      (Array(6., dtype=float32), Array([0., 1., 4., 9.], dtype=float32))
    """
    if not pipelines_layers:
        return lax.scan(body, init, xs)

    def element(i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs)

    def iterate(state: tuple[jax.Array, jax.Array, Any, Any]) -> tuple[jax.Array, jax.Array, Any, Any]:
        bit, i, carry, ys = state
        carry, y = body(carry, element(i))
        ys = jax.tree.map(lambda stacked, new: lax.dynamic_update_index_in_dim(stacked, new, i, 0), ys, y)
        return lax.shift_right_logical(bit, np.int32(1)), i + np.int32(1), carry, ys

    shapes = jax.eval_shape(lambda carry: body(carry, element(np.int32(0)))[1], init)
    ys = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), shapes)
    start = jnp.asarray(1 << (length - 1), np.int32), jnp.zeros([], np.int32), init, ys
    _, _, carry, ys = lax.while_loop(lambda state: state[0] > 0, iterate, start)
    return carry, ys
