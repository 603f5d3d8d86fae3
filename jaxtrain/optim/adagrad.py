"""Adagrad with the arithmetic of `torch.optim.Adagrad` (`torch/optim/adagrad.py`).

`optax.adagrad` initializes its sum with 0.1 and adds eps inside the root.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.preprocessing import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class AdagradState(NamedTuple):
    """State of `adagrad`.

    Attributes:
      count: int32[], updates so far.
      sum: Sum of the squared gradients.
    """

    count: jax.Array  # type: ignore[assignment]
    sum: Any


@optimizer
def adagrad(
    learning_rate: LearningRate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad, as `torch.optim.Adagrad`.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      lr_decay: The update is divided by 1 + updates · lr_decay, independently of any schedule.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      initial_accumulator_value: Initial value of the sum of squares.
      eps: Added to the root.
      maximize: Whether to maximize the objective: the gradient is negated.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adagrad(0.1)
      >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
      -0.1
    """

    def init(params: Any) -> AdagradState:
        filled = jax.tree.map(lambda p: jnp.full_like(p, initial_accumulator_value), params)
        return AdagradState(jnp.zeros([], np.int32), filled)

    def update(grads: Any, state: AdagradState, params: Any = None) -> tuple[Any, AdagradState]:
        del params
        total = jax.tree.map(lambda s, g: s + g * g, state.sum, grads)

        def direction(g: jax.Array, s: jax.Array) -> jax.Array:
            return g / (jnp.sqrt(s) + eps) / (1 + state.count.astype(g.dtype) * lr_decay)

        return jax.tree.map(direction, grads, total), AdagradState(optax.safe_increment(state.count), total)

    scale_by_adagrad = optax.GradientTransformation(init, update)
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize), scale_by_adagrad, scale_by_learning_rate(learning_rate)
    )
