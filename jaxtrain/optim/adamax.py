"""Adamax with the arithmetic of `torch.optim.Adamax` (`torch/optim/adamax.py`).

`optax.adamax` is equal in float64; in float32 its bias correction is a float32 power.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, one_minus_power, value_at, zeros
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class AdamaxState(NamedTuple):
    """State of `adamax`.

    Attributes:
      count: int32[], updates so far.
      mu: Moving average of the gradients.
      norm: Decaying maximum of |gradient| + eps.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    norm: Any


@optimizer
def adamax(
    learning_rate: LearningRate = 2e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adamax, as `torch.optim.Adamax`.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the maximum.
      eps: Added to the gradient's magnitude.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adamax(0.1)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -0.1
    """

    def init(params: Any) -> AdamaxState:
        return AdamaxState(jnp.zeros([], np.int32), zeros(params), zeros(params))

    def update(grads: Any, state: AdamaxState, params: Any = None) -> tuple[Any, AdamaxState]:
        del params
        beta1 = value_at(b1, state.count)
        count = optax.safe_increment(state.count)
        mu = average(beta1, state.mu, grads)
        norm = jax.tree.map(lambda u, g: jnp.maximum(b2 * u, jnp.abs(g) + eps), state.norm, grads)
        direction = jax.tree.map(lambda m, u: m / one_minus_power(beta1, count.astype(m.dtype)) / u, mu, norm)
        return direction, AdamaxState(count, mu, norm)

    scale_by_adamax = optax.GradientTransformation(init, update)
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize), scale_by_adamax, scale_by_learning_rate(learning_rate)
    )
