"""Rprop with the arithmetic of `torch.optim.Rprop` (`torch/optim/rprop.py`).

The first update of `optax.rprop` is zero; that of PyTorch is not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import zeros
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import rate_at


class RpropState(NamedTuple):
    """State of `rprop`.

    Attributes:
      prev: Last gradient, 0 where its sign had changed.
      step_size: Step size of every element.
    """

    prev: Any
    step_size: Any


@optimizer
def rprop(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Rprop, as `torch.optim.Rprop`: the learning rate is only the initial step size of every element.

    A schedule is evaluated at update 0 only, as in PyTorch, and the state holds no learning rate. A zero gradient
    leaves the element and its step size unchanged.

    Args:
      learning_rate: A number, or a schedule of the number of updates.
      etas: Factors of the step size when the gradient's sign changes, and when it does not.
      step_sizes: Lower and upper bound of the step size.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = rprop(0.1)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -0.1
    """

    def init(params: Any) -> RpropState:
        first = rate_at(learning_rate, jnp.zeros([], np.int32))
        return RpropState(zeros(params), jax.tree.map(lambda p: jnp.full_like(p, first.astype(p.dtype)), params))

    def update(grads: Any, state: RpropState, params: Any = None) -> tuple[Any, RpropState]:
        del params
        agree = jax.tree.map(lambda g, p: jnp.sign(g * p), grads, state.prev)

        def adapt(size: jax.Array, sign: jax.Array) -> jax.Array:
            eta = jnp.where(sign > 0, etas[1], jnp.where(sign < 0, etas[0], 1.0)).astype(size.dtype)
            return jnp.clip(size * eta, step_sizes[0], step_sizes[1])

        size = jax.tree.map(adapt, state.step_size, agree)
        active = jax.tree.map(lambda g, sign: jnp.where(sign < 0, 0, g), grads, agree)
        return jax.tree.map(lambda g, s: -jnp.sign(g) * s, active, size), RpropState(active, size)

    return optax.chain(*gradient_preprocessing(0.0, maximize), optax.GradientTransformation(init, update))
