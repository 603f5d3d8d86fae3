"""Adagrad with the arithmetic of `torch.optim.Adagrad` (`torch/optim/adagrad.py`).

`optax.adagrad` starts its sum at 0.1 and keeps eps inside the root.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.gradient import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class AdagradState(NamedTuple):
    """`count` int32[], updates so far; `sum`, of g²."""

    count: jax.Array  # type: ignore[assignment]
    sum: Any


def adagrad(
    learning_rate: LearningRate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adagrad`. `lr_decay` divides the learning rate by 1 + updates · lr_decay, unseen by schedulers.

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
