"""`torch.optim.lr_scheduler.ReduceLROnPlateau` (`torch/optim/lr_scheduler.py`) as an optimizer's learning rate.

`optax.contrib.reduce_on_plateau` scales updates; PyTorch's floor and eps are of the learning rate itself.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.step import descend


class PlateauState(NamedTuple):
    """`learning_rate` float[], of the last update; `next_rate`, of the next; `best` float[], the best value so far;
    `bad` and `cooldown` int32[], values since that were no better, and values yet to be passed over."""

    learning_rate: jax.Array
    next_rate: jax.Array
    best: jax.Array
    bad: jax.Array
    cooldown: jax.Array


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
    """A learning rate that falls when `value` has stopped improving: `sgd(reduce_lr_on_plateau(0.1))`.

    `update(…, value=loss)` is PyTorch's `optimizer.step(); scheduler.step(loss)`: the value decides the next rate.
    Without `value`, or with None, it is `optimizer.step()` alone.

    >>> tx = reduce_lr_on_plateau(1.0, patience=0)
    >>> state = tx.init(None)
    >>> for loss in [3.0, 3.0, 3.0]:
    ...     updates, state = tx.update(jnp.ones(1), state, value=loss)
    >>> round(float(updates[0]), 6), round(float(state.next_rate), 6)
    (-0.1, 0.01)
    """
    for what, choice, known in (("mode", mode, ("min", "max")), ("threshold_mode", threshold_mode, ("rel", "abs"))):
        if choice not in known:
            raise UserError(f"{what} {choice!r} is unknown: choose from {', '.join(known)}")
    if factor >= 1:
        raise UserError(f"factor {factor} reduces nothing: make it less than 1")
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
        return descend(lr, updates), new if value is None else observed(new, jnp.asarray(value, lr.dtype))

    def observed(state: PlateauState, value: jax.Array) -> PlateauState:
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
