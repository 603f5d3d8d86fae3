"""RMSprop with the arithmetic of `torch.optim.RMSprop` (`torch/optim/rmsprop.py`).

`optax.rmsprop` decays by 0.9 instead of 0.99, adds eps inside the root by default, and applies the learning rate inside
the momentum buffer: under a schedule its momentum uses the rates of past updates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, squares, value_at, zeros
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class RmspropState(NamedTuple):
    """State of `rmsprop`.

    Attributes:
      count: int32[], updates so far.
      nu: Moving average of the squared gradients.
      mu: Moving average of the gradients; None unless centered.
      momentum_buffer: None without momentum.
    """

    count: jax.Array  # type: ignore[assignment]
    nu: Any
    mu: Any
    momentum_buffer: Any


@optimizer
def rmsprop(
    learning_rate: LearningRate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: optax.ScalarOrSchedule = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """RMSprop, as `torch.optim.RMSprop`: eps outside the root, the learning rate outside the buffer.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      alpha: Decay of the moving averages.
      eps: Added to the root.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      momentum: Decay of the momentum buffer, or a schedule of it.
      centered: Whether to divide by an estimate of the variance.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = rmsprop(0.1)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -1.0
    """
    buffered = callable(momentum) or momentum > 0

    def init(params: Any) -> RmspropState:
        return RmspropState(
            jnp.zeros([], np.int32),
            zeros(params),
            zeros(params) if centered else None,
            zeros(params) if buffered else None,
        )

    def update(grads: Any, state: RmspropState, params: Any = None) -> tuple[Any, RmspropState]:
        del params
        nu = average(alpha, state.nu, squares(grads))
        mu = average(alpha, state.mu, grads) if centered else None
        variance = jax.tree.map(lambda v, m: v - m * m, nu, mu) if centered else nu
        direction = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + eps), grads, variance)
        buffer = None
        if buffered:
            decay = value_at(momentum, state.count)
            direction = buffer = jax.tree.map(
                lambda b, d: jnp.asarray(decay, d.dtype) * b + d, state.momentum_buffer, direction
            )
        return direction, RmspropState(optax.safe_increment(state.count), nu, mu, buffer)

    scale_by_rmsprop = optax.GradientTransformation(init, update)
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize), scale_by_rmsprop, scale_by_learning_rate(learning_rate)
    )
