"""NAdam with the arithmetic of `torch.optim.NAdam` (`torch/optim/nadam.py`).

`optax.nadam` has no momentum schedule: it is a different algorithm, whose first update differs by a third.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, one_minus_power, squares, value_at, zeros
from jaxtrain.optim.preprocessing import with_weight_decay
from jaxtrain.step import LearningRate, scale_by_learning_rate


class NadamState(NamedTuple):
    """State of `nadam`.

    Attributes:
      count: int32[], updates so far.
      mu_product: float[], product of the momenta so far.
      mu: Moving average of the gradients.
      nu: Moving average of the squared gradients.
    """

    count: jax.Array  # type: ignore[assignment]
    mu_product: jax.Array
    mu: Any
    nu: Any


@optimizer
def nadam(
    learning_rate: LearningRate = 2e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """NAdam, as `torch.optim.NAdam`: its momentum grows to `b1`.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Weight decay.
      momentum_decay: Rate at which the momentum grows.
      decoupled_weight_decay: Whether the decay is added to the update (as in AdamW) instead of to the gradient.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = nadam(1.0, b1=0.0, eps=0.0)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -1.0
    """
    direction = _scale_by_nadam(b1, b2, eps, momentum_decay)
    return optax.chain(
        *with_weight_decay(direction, weight_decay, decoupled_weight_decay, maximize),
        scale_by_learning_rate(learning_rate),
    )


def _scale_by_nadam(
    b1: optax.ScalarOrSchedule, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformation:
    def momentum(beta1: Any, t: jax.Array) -> jax.Array:
        return beta1 * (1 - 0.5 * jnp.exp(t * (momentum_decay * math.log(0.96))))

    def init(params: Any) -> NadamState:
        return NadamState(jnp.zeros([], np.int32), jnp.ones([], jnp.result_type(float)), zeros(params), zeros(params))

    def update(grads: Any, state: NadamState, params: Any = None) -> tuple[Any, NadamState]:
        del params
        beta1 = value_at(b1, state.count)
        count = optax.safe_increment(state.count)
        t = count.astype(state.mu_product.dtype)
        now, later = momentum(beta1, t), momentum(beta1, t + 1)
        product = state.mu_product * now
        of_gradient, of_mean = (1 - now) / (1 - product), later / (1 - product * later)
        mu = average(beta1, state.mu, grads)
        nu = average(b2, state.nu, squares(grads))

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / one_minus_power(b2, count.astype(v.dtype)))
            return (of_gradient.astype(g.dtype) * g + of_mean.astype(g.dtype) * m) / (root + eps)

        return jax.tree.map(direction, grads, mu, nu), NadamState(count, product, mu, nu)

    return optax.GradientTransformation(init, update)
