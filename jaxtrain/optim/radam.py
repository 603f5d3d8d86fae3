"""RAdam with the arithmetic of `torch.optim.RAdam` (`torch/optim/radam.py`).

`optax.radam` adds eps after the bias correction, PyTorch before it. ρₜ, the length of the moving average, is a small
difference of large numbers: PyTorch computes it in double, `_length` in a form for which float32 suffices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.adamw import AdamState
from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, one_minus_power, squares, value_at, zeros
from jaxtrain.optim.preprocessing import with_weight_decay
from jaxtrain.step import LearningRate, scale_by_learning_rate


@optimizer
def radam(
    learning_rate: LearningRate = 1e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """RAdam, as `torch.optim.RAdam`: momentum alone until the second moment's average is five gradients long.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Weight decay.
      decoupled_weight_decay: Whether the decay is added to the update (as in AdamW) instead of to the gradient.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = radam(0.1)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -0.3
    """
    direction = _scale_by_radam(b1, b2, eps)
    return optax.chain(
        *with_weight_decay(direction, weight_decay, decoupled_weight_decay, maximize),
        scale_by_learning_rate(learning_rate),
    )


def _scale_by_radam(b1: optax.ScalarOrSchedule, b2: float, eps: float) -> optax.GradientTransformation:
    longest = 2 / (1 - b2) - 1

    def init(params: Any) -> AdamState:
        return AdamState(jnp.zeros([], np.int32), zeros(params), zeros(params))

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        del params
        beta1 = value_at(b1, state.count)
        count = optax.safe_increment(state.count)
        mu = average(beta1, state.mu, grads)
        nu = average(b2, state.nu, squares(grads))

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            t = count.astype(m.dtype)
            mean = m / one_minus_power(beta1, t)
            if longest <= 5:
                return mean
            rho = _length(b2, t)
            rectified = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
            rectified = jnp.sqrt(jnp.where(rho > 5, rectified, 1))
            return jnp.where(rho > 5, mean * rectified * jnp.sqrt(one_minus_power(b2, t)) / (jnp.sqrt(v) + eps), mean)

        return jax.tree.map(direction, mu, nu), AdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _length(b: float, t: jax.Array) -> jax.Array:
    """Return ρₜ = 2/(1−b) − 1 − 2t·bᵗ/(1−bᵗ) without its cancellation.

    With L = −log b and x = tL it equals 2(1/(1−b) − t/(eˣ−1)) − 1. For small x the poles 1/L of both terms cancel, and
    the remainder of the second is the series of 1/(eˣ−1) − 1/x + 1/2, with Bernoulli's numbers.
    """
    rate = -math.log(b)
    x = t * rate
    odd = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000)
    small = jnp.minimum(x, 0.5)
    series = small * jnp.polyval(jnp.array(odd[::-1], t.dtype), small * small)
    mean_age = jnp.where(x < 0.5, t * (0.5 - series), 1 / rate - t / jnp.expm1(jnp.maximum(x, 0.5)))
    return 2 * (1 / (1 - b) - 1 / rate + mean_age) - 1
