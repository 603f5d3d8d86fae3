"""NAdam with the arithmetic of `torch.optim.NAdam` (`torch/optim/nadam.py`).

`optax.nadam` has no momentum schedule: it is another algorithm, a third off from the first update on.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.gradient import with_weight_decay
from jaxtrain.optim.moments import average, one_minus_power, squares, value_at, zeros
from jaxtrain.step import LearningRate, scale_by_learning_rate


class NadamState(NamedTuple):
    """`count` int32[], updates so far; `mu_product` float[], of their momenta; `mu` and `nu`, the averages of g, g²."""

    count: jax.Array  # type: ignore[assignment]
    mu_product: jax.Array
    mu: Any
    nu: Any


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
    """`torch.optim.NAdam`, whose momentum grows to `b1` at the pace of `momentum_decay`.

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
