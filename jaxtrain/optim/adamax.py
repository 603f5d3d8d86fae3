"""Adamax with the arithmetic of `torch.optim.Adamax` (`torch/optim/adamax.py`).

`optax.adamax` is equal in float64; its float32 bias correction is a float32 power.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.gradient import gradient_preprocessing
from jaxtrain.optim.moments import average, one_minus_power, value_at, zeros
from jaxtrain.step import LearningRate, scale_by_learning_rate


class AdamaxState(NamedTuple):
    """`count` int32[], updates so far; `mu`, the moving average of g; `norm`, the decaying maximum of |g| + eps."""

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    norm: Any


def adamax(
    learning_rate: LearningRate = 2e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adamax`.

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
