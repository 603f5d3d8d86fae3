"""A learning rate that the loss function returns, as that of a loop which sets it by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.step import LearningRateState, descend


def rate_of_metric(name: str = "rate") -> optax.GradientTransformationExtraArgs:
    """Scale updates by a metric of the loss function: `adamw(rate_of_metric("rate"))`.

    `train_step` passes the metrics of each update, such as `{"rate": batch["rate"]}`.

    Args:
      name: Name of the metric.

    Returns:
      An optax transformation, in place of a learning rate.

    Raises:
      UserError: In an update: there is no such metric.

    Example:
      >>> tx = rate_of_metric("rate")
      >>> updates, _ = tx.update(jnp.ones(1), tx.init(None), metrics={"rate": jnp.float32(0.5)})
      >>> float(updates[0])
      -0.5
    """

    def init(params: Any) -> LearningRateState:
        del params
        return LearningRateState(jnp.zeros([], np.int32), jnp.zeros([], jnp.result_type(float)))

    def update(updates: Any, state: LearningRateState, params: Any = None, *, metrics: Any = None, **extra: Any) -> Any:
        del params, extra
        if name not in (metrics or {}):
            raise UserError(f"rate_of_metric: loss_fn returns no metric {name!r}: return it, as in {{{name!r}: rate}}")
        lr = jnp.asarray(metrics[name], state.learning_rate.dtype)
        return descend(lr, updates), LearningRateState(optax.safe_increment(state.count), lr)

    return optax.GradientTransformationExtraArgs(init, update)
