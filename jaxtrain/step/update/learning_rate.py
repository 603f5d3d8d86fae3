"""The learning rate of an optimizer, stored in its state, where the rate that an update used can be read."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError

LearningRate: TypeAlias = optax.ScalarOrSchedule | optax.GradientTransformation
"""A number, a schedule of the number of applied updates, or a transformation that scales by one, as
`reduce_lr_on_plateau`."""


class LearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`.

    Attributes:
      count: int32[], updates so far.
      learning_rate: float[], rate of the last update.
    """

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array


def scale_by_learning_rate(learning_rate: LearningRate) -> optax.GradientTransformation:
    """Scale updates by −learning_rate, as `optax.scale_by_learning_rate`, and store the rate in the state.

    Args:
      learning_rate: A number, a schedule, or a transformation, which is returned as it is.

    Returns:
      An optax transformation.

    Example:
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
    """Return the learning rate of update number `count`, float[]."""
    if isinstance(learning_rate, optax.GradientTransformation):
        raise UserError(
            "reduce_lr_on_plateau and rate_of_metric are not supported by an optimizer that reads its rate: "
            "use a schedule"
        )
    value = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(value, jnp.result_type(float))


def descend(lr: jax.Array, updates: Any) -> Any:
    """Return −lr · updates."""
    return jax.tree.map(lambda u: -lr.astype(u.dtype) * u, updates)


def used_learning_rate(opt_state: Any) -> Any:
    """Return the learning rate that the last update used.

    Args:
      opt_state: State of an optimizer of `jaxtrain.optim` or of `optax.inject_hyperparams`.

    Returns:
      float[]; None if the state holds no learning rate or several (see `used_learning_rates`).
    """
    rates = [rate for _, rate in _rates(opt_state)]
    return rates[0] if len(rates) == 1 else None


def used_learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    """Return the learning rate that each parameter group's last update used.

    Args:
      opt_state: State of an optimizer built by `jaxtrain.optim.groups`.

    Returns:
      Learning rates, float[], by group name; groups without one are left out.

    Example:
      >>> from jaxtrain.optim import groups, sgd
      >>> tx = groups(lambda path: path, {"body": sgd(0.1), "head": sgd(0.5), "rest": optax.set_to_zero()})
      >>> state = tx.init({"body": jnp.ones(1), "head": jnp.ones(1)})
      >>> {name: round(float(lr), 6) for name, lr in used_learning_rates(state).items()}
      {'body': 0.1, 'head': 0.5}
    """
    by_group = {}
    for path, rate in _rates(opt_state):
        keys = [getattr(entry, "name", getattr(entry, "key", None)) for entry in path]
        if "inner_states" in keys:
            by_group[str(keys[keys.index("inner_states") + 1])] = rate
    return by_group


def _rates(opt_state: Any) -> list[tuple[Any, jax.Array]]:
    # optax stores the state of an injected schedule under the same name.
    entries = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, x) for path, x in entries if isinstance(x, jax.Array)]
