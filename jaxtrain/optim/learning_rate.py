"""The learning rate an optimizer multiplies by, kept in its state: what an update used is read there, not guessed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class LearningRateState(NamedTuple):
    """`count` int32[], updates so far; `learning_rate` float[], of the last of them."""

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array


def scale_by_learning_rate(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, which a schedule of the updates made so far may drive, and which remembers.

    >>> tx = scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 10))
    >>> _, state = tx.update(jnp.ones(1), tx.init(None))
    >>> round(float(used_learning_rate(state)), 6)
    0.1
    """

    def rate(count: jax.Array) -> jax.Array:
        value = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.asarray(value, jnp.result_type(float))

    def init(params: Any) -> LearningRateState:
        del params
        zero = jnp.zeros([], np.int32)
        return LearningRateState(zero, rate(zero))

    def update(updates: Any, state: LearningRateState, params: Any = None) -> tuple[Any, LearningRateState]:
        del params
        lr = rate(state.count)
        scaled = jax.tree.map(lambda u: -lr.astype(u.dtype) * u, updates)
        return scaled, LearningRateState(optax.safe_increment(state.count), lr)

    return optax.GradientTransformation(init, update)


def used_learning_rate(opt_state: Any) -> Any:
    """The one learning rate in an optimizer's state, ours or `optax.inject_hyperparams`'s; None if none, or many."""
    # optax keeps the state of an injected schedule under the same name.
    found = [x for _, x in optax.tree.get_all_with_path(opt_state, "learning_rate") if isinstance(x, jax.Array)]
    return found[0] if len(found) == 1 else None
