"""The learning rate an optimizer multiplies by, kept in its state: what an update used is read there, not guessed."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError

LearningRate: TypeAlias = optax.ScalarOrSchedule | optax.GradientTransformation
"""A number, a schedule of the updates made so far, or a transformation that scales by one: `reduce_lr_on_plateau`."""


class LearningRateState(NamedTuple):
    """`count` int32[], updates so far; `learning_rate` float[], of the last of them."""

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array


def scale_by_learning_rate(learning_rate: LearningRate) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, which a schedule of the updates made so far may drive, and which remembers.

    >>> tx = scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 10))
    >>> _, state = tx.update(jnp.ones(1), tx.init(None))
    >>> round(float(used_learning_rate(state)), 6)
    0.1
    """
    if isinstance(learning_rate, optax.GradientTransformation):
        return learning_rate

    def init(params: Any) -> LearningRateState:
        del params
        zero = jnp.zeros([], np.int32)
        return LearningRateState(zero, rate_at(learning_rate, zero))

    def update(updates: Any, state: LearningRateState, params: Any = None) -> tuple[Any, LearningRateState]:
        del params
        lr = rate_at(learning_rate, state.count)
        return descend(lr, updates), LearningRateState(optax.safe_increment(state.count), lr)

    return optax.GradientTransformation(init, update)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """float[]: the rate of the update numbered `count`."""
    if isinstance(learning_rate, optax.GradientTransformation):
        raise UserError("an optimizer that reads its learning rate takes no reduce_lr_on_plateau: give it a schedule")
    value = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(value, jnp.result_type(float))


def descend(lr: jax.Array, updates: Any) -> Any:
    """−lr · updates."""
    return jax.tree.map(lambda u: -lr.astype(u.dtype) * u, updates)


def used_learning_rate(opt_state: Any) -> Any:
    """The one learning rate in an optimizer's state, ours or `optax.inject_hyperparams`'s; None if none, or many.

    Where parameter groups have each their own, `used_learning_rates` tells them apart.
    """
    found = [rate for _, rate in _rates(opt_state)]
    return found[0] if len(found) == 1 else None


def used_learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    """Group name → learning rate, of an optimizer made by `groups`; groups without a rate are left out.

    >>> from jaxtrain.optim import groups, sgd
    >>> tx = groups(lambda path: path, {"body": sgd(0.1), "head": sgd(0.5), "rest": optax.set_to_zero()})
    >>> state = tx.init({"body": jnp.ones(1), "head": jnp.ones(1)})
    >>> {name: round(float(lr), 6) for name, lr in used_learning_rates(state).items()}
    {'body': 0.1, 'head': 0.5}
    """
    named = {}
    for path, rate in _rates(opt_state):
        keys = [getattr(entry, "name", getattr(entry, "key", None)) for entry in path]
        if "inner_states" in keys:
            named[str(keys[keys.index("inner_states") + 1])] = rate
    return named


def _rates(opt_state: Any) -> list[tuple[Any, jax.Array]]:
    # optax keeps the state of an injected schedule under the same name.
    found = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, x) for path, x in found if isinstance(x, jax.Array)]
