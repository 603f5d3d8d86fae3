"""`torch.optim.lr_scheduler.ReduceLROnPlateau` (`torch/optim/lr_scheduler.py`) as an optimizer's learning rate.

`optax.contrib.reduce_on_plateau` scales updates; PyTorch's floor and eps refer to the learning rate itself.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import bounded
from jaxtrain.step import descend


class PlateauState(NamedTuple):
    """State of `reduce_lr_on_plateau`.

    Attributes:
      learning_rate: float[], rate of the last update.
      next_rate: float[], rate of the next update.
      best: float[], best value so far.
      bad: int32[], values since then that did not improve on it.
      cooldown: int32[], values yet to be ignored.
    """

    learning_rate: jax.Array
    next_rate: jax.Array
    best: jax.Array
    bad: jax.Array
    cooldown: jax.Array


@bounded
def reduce_lr_on_plateau(
    learning_rate: float,
    mode: str = "min",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Reduce the learning rate when `value` stops improving: `sgd(reduce_lr_on_plateau(0.1))`.

    `update(…, value=loss)` is PyTorch's `optimizer.step(); scheduler.step(loss)`: the value determines the next rate.
    `train_step` passes the window's mean loss. Without `value`, or with None, it is `optimizer.step()` alone.

    Args:
      learning_rate: Initial learning rate.
      mode: "min" or "max": whether a smaller or a larger value is better.
      factor: Factor of the learning rate at a reduction, below 1.
      patience: Number of values without improvement that are tolerated.
      threshold: Smallest change that counts as an improvement.
      threshold_mode: "rel" or "abs": whether the threshold is relative to the best value.
      cooldown: Number of values ignored after a reduction.
      min_lr: Lower bound of the learning rate.
      eps: Smallest change of the learning rate that is applied.

    Returns:
      An optax transformation.

    Example:
      >>> tx = reduce_lr_on_plateau(1.0, patience=0)
      >>> state = tx.init(None)
      >>> for loss in [3.0, 3.0, 3.0]:
      ...     updates, state = tx.update(jnp.ones(1), state, value=loss)
      >>> round(float(updates[0]), 6), round(float(state.next_rate), 6)
      (-0.1, 0.01)
    """
    for what, choice, known in (("mode", mode, ("min", "max")), ("threshold_mode", threshold_mode, ("rel", "abs"))):
        if choice not in known:
            raise UserError(f"{what} {choice!r} is unknown: use one of {', '.join(known)}")
    if factor >= 1:
        raise UserError(f"factor must be < 1, got {factor}: use 0.1")
    sign = 1 if mode == "min" else -1

    def init(params: Any) -> PlateauState:
        del params
        lr = jnp.asarray(learning_rate, jnp.result_type(float))
        zero = jnp.zeros([], jnp.int32)
        return PlateauState(lr, jnp.copy(lr), jnp.full_like(lr, sign * math.inf), zero, jnp.copy(zero))

    def update(updates: Any, state: PlateauState, params: Any = None, *, value: Any = None, **extra: Any) -> Any:
        del params, extra
        lr = state.next_rate
        new = state._replace(learning_rate=lr)
        return descend(lr, updates), new if value is None else observe(new, jnp.asarray(value, lr.dtype))

    def observe(state: PlateauState, value: jax.Array) -> PlateauState:
        bar = state.best * (1 - sign * threshold) if threshold_mode == "rel" else state.best - sign * threshold
        better = sign * value < sign * bar
        cooling = state.cooldown > 0
        bad = jnp.where(better | cooling, 0, state.bad + 1)
        reduce = bad > patience
        lower = jnp.maximum(state.next_rate * factor, min_lr)
        return PlateauState(
            state.learning_rate,
            jnp.where(reduce & (state.next_rate - lower > eps), lower, state.next_rate),
            jnp.where(better, value, state.best),
            jnp.where(reduce, 0, bad),
            jnp.where(reduce, cooldown, state.cooldown - cooling.astype(jnp.int32)),
        )

    return optax.GradientTransformationExtraArgs(init, update)
