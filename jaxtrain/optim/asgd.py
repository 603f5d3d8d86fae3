"""Averaged SGD with the arithmetic of `torch.optim.ASGD` (`torch/optim/asgd.py`), which optax does not have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import zeros
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import descend, rate_at


class AsgdState(NamedTuple):
    """State of `asgd`.

    Attributes:
      count: int32[], updates so far.
      learning_rate: float[], the scheduler's rate at the last update.
      eta: float[], step size of the next update.
      mu: float[], weight of the next update in the average.
      ax: Averaged parameters.
    """

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array
    eta: jax.Array
    mu: jax.Array
    ax: Any


@optimizer
def asgd(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Averaged SGD, as `torch.optim.ASGD`.

    Each step uses the `eta` that the previous update computed, so that a schedule acts one update late.
    `optax.tree.get(state, "ax")` are the averaged parameters, which PyTorch too stores without using them.

    Args:
      learning_rate: A number, or a schedule of the number of updates.
      lambd: Decay of the parameters and of the step size.
      alpha: Exponent of the step size.
      t0: Number of updates before averaging starts.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = asgd(0.1, lambd=0.0)
      >>> updates, _ = tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)), jnp.zeros(1))
      >>> round(float(updates[0]), 6)
      -0.3
    """

    def init(params: Any) -> AsgdState:
        zero = jnp.zeros([], np.int32)
        first = rate_at(learning_rate, zero)
        return AsgdState(zero, first, jnp.copy(first), jnp.ones_like(first), zeros(params))

    def update(grads: Any, state: AsgdState, params: Any) -> tuple[Any, AsgdState]:
        decayed = jax.tree.map(lambda g, p: g + lambd * p, grads, params)
        updates = descend(state.eta, decayed)

        def update_average(ax: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            new = p + u
            return jnp.where(state.mu == 1, new, ax + (new - ax) * state.mu.astype(ax.dtype))

        lr = rate_at(learning_rate, state.count)
        count = optax.safe_increment(state.count)
        t = count.astype(lr.dtype)
        eta, mu = lr / (1 + lambd * lr * t) ** alpha, 1 / jnp.maximum(1, t - t0)
        return updates, AsgdState(count, lr, eta, mu, jax.tree.map(update_average, state.ax, params, updates))

    return optax.chain(*gradient_preprocessing(weight_decay, maximize), optax.GradientTransformation(init, update))
