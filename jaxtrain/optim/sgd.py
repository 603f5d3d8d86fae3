"""SGD with the arithmetic of `torch.optim.SGD` (`torch/optim/sgd.py`)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import value_at, zeros
from jaxtrain.optim.preprocessing import Mask, gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class MomentumState(NamedTuple):
    """State of SGD with momentum.

    Attributes:
      count: int32[], updates so far.
      momentum_buffer: Pytree like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]
    momentum_buffer: Any


@optimizer
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
    """SGD, as `torch.optim.SGD`: the learning rate is outside the buffer, so that a schedule acts at once.

    A zero gradient still updates a parameter with momentum or decay; PyTorch skips one whose gradient is None.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      momentum: Decay of the momentum buffer, or a schedule of it.
      dampening: Each gradient but the first enters the buffer times 1 − dampening.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      nesterov: Whether to use Nesterov momentum.
      maximize: Whether to maximize the objective: the gradient is negated.
      mask: What decays: a pytree of booleans, or a function from the parameters to one.

    Returns:
      An optax transformation.

    Example:
      >>> tx = sgd(0.1, momentum=0.9, dampening=0.5)
      >>> state, history = tx.init(jnp.zeros(1)), []
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones(1), state)
      ...     history.append(round(float(updates[0]), 6))
      >>> history      # the first gradient is not dampened
      [-0.1, -0.14]
    """
    if nesterov and (dampening or (not callable(momentum) and momentum <= 0)):
        raise UserError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}: change them")
    buffered = callable(momentum) or momentum
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize, mask),
        *([scale_by_momentum(momentum, dampening, nesterov)] if buffered else []),
        scale_by_learning_rate(learning_rate),
    )


def scale_by_momentum(
    momentum: optax.ScalarOrSchedule, dampening: float, nesterov: bool
) -> optax.GradientTransformation:
    """Accumulate gradients in the momentum buffer of `sgd`."""

    def init(params: Any) -> MomentumState:
        return MomentumState(jnp.zeros([], np.int32), zeros(params))

    def update(grads: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        del params
        mu = value_at(momentum, state.count)
        undamped = jnp.where(state.count == 0, 1.0, 1 - dampening)

        def accumulate(buffer: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.asarray(mu, g.dtype) * buffer + undamped.astype(g.dtype) * g

        buffer = jax.tree.map(accumulate, state.momentum_buffer, grads)
        direction = jax.tree.map(lambda b, g: g + jnp.asarray(mu, g.dtype) * b, buffer, grads) if nesterov else buffer
        return direction, MomentumState(optax.safe_increment(state.count), buffer)

    return optax.GradientTransformation(init, update)
