"""Optimizers that take turns, as those of a generator and a discriminator."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError


class TurnsState(NamedTuple):
    """State of `at_turns`.

    Attributes:
      count: int32[], updates so far, those of other turns too.
      inner: State of the optimizer.
    """

    count: jax.Array  # type: ignore[assignment]
    inner: Any


def at_turns(
    optimizer: optax.GradientTransformation, turns: Sequence[int], every: int
) -> optax.GradientTransformationExtraArgs:
    """Update at some turns of a cycle: at others, parameters and the optimizer's state stay as they are.

    Args:
      optimizer: An optax transformation.
      turns: Numbers of the updates of a cycle in which it updates.
      every: Number of updates of a cycle.

    Returns:
      An optax transformation.

    Raises:
      UserError: A turn is not in the cycle.

    Example:
      >>> from jaxtrain.optim import sgd
      >>> tx = at_turns(sgd(0.5), turns=[1], every=2)
      >>> state, found = tx.init(jnp.zeros(1)), []
      >>> for _ in range(4):
      ...     updates, state = tx.update(jnp.ones(1), state, jnp.zeros(1))
      ...     found.append(float(updates[0]))
      >>> found
      [0.0, -0.5, 0.0, -0.5]
    """
    if not turns or not all(0 <= turn < every for turn in turns):
        raise UserError(f"turns must be numbers from 0 to {every - 1}, got {list(turns)}: choose every above them")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> TurnsState:
        return TurnsState(jnp.zeros([], np.int32), inner.init(params))

    def update(grads: Any, state: TurnsState, params: Any = None, **extra: Any) -> tuple[Any, TurnsState]:
        updates, new = inner.update(grads, state.inner, params, **extra)
        is_turn = jnp.isin(state.count % every, jnp.array(turns, np.int32))
        updates = jax.tree.map(lambda x: jnp.where(is_turn, x, jnp.zeros_like(x)), updates)
        kept = jax.tree.map(lambda x, old: jnp.where(is_turn, x, old), new, state.inner)
        return updates, TurnsState(optax.safe_increment(state.count), kept)

    return optax.GradientTransformationExtraArgs(init, update)
