"""SGD with the arithmetic of `torch.optim.SGD` (`torch/optim/sgd.py`)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.optim.gradient import Mask, gradient_preprocessing
from jaxtrain.optim.moments import value_at, zeros
from jaxtrain.step import LearningRate, scale_by_learning_rate


class MomentumState(NamedTuple):
    """`count` int32[], updates so far; `momentum_buffer`, like the parameters."""

    count: jax.Array  # type: ignore[assignment]
    momentum_buffer: Any


def sgd(
    learning_rate: LearningRate = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.SGD`: the learning rate outside the buffer, so that a schedule acts at once.

    `mask` chooses what decays. A zero gradient still moves a parameter that has momentum or decays; PyTorch leaves
    one alone whose gradient is None.

    >>> tx = sgd(0.1, momentum=0.9, dampening=0.5)
    >>> state, moved = tx.init(jnp.zeros(1)), []
    >>> for _ in range(2):
    ...     updates, state = tx.update(jnp.ones(1), state)
    ...     moved.append(round(float(updates[0]), 6))
    >>> moved      # dampening spares the first gradient
    [-0.1, -0.14]
    """
    if nesterov and (dampening or (not callable(momentum) and momentum <= 0)):
        raise UserError(f"nesterov with momentum {momentum}, dampening {dampening}: give momentum and no dampening")
    buffered = callable(momentum) or momentum
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize, mask),
        *([_momentum(momentum, dampening, nesterov)] if buffered else []),
        scale_by_learning_rate(learning_rate),
    )


def _momentum(momentum: optax.ScalarOrSchedule, dampening: float, nesterov: bool) -> optax.GradientTransformation:
    def init(params: Any) -> MomentumState:
        return MomentumState(jnp.zeros([], np.int32), zeros(params))

    def update(grads: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        del params
        mu = value_at(momentum, state.count)
        undamped = jnp.where(state.count == 0, 1.0, 1 - dampening)

        def heavy(buffer: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.asarray(mu, g.dtype) * buffer + undamped.astype(g.dtype) * g

        buffer = jax.tree.map(heavy, state.momentum_buffer, grads)
        direction = jax.tree.map(lambda b, g: g + jnp.asarray(mu, g.dtype) * b, buffer, grads) if nesterov else buffer
        return direction, MomentumState(optax.safe_increment(state.count), buffer)

    return optax.GradientTransformation(init, update)
