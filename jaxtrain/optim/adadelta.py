"""Adadelta with the arithmetic of `torch.optim.Adadelta` (`torch/optim/adadelta.py`): optax's, PyTorch's defaults."""

import optax

from jaxtrain.optim.gradient import gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


def adadelta(
    learning_rate: LearningRate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adadelta`.

    >>> import jax.numpy as jnp
    >>> tx = adadelta()
    >>> round(float(tx.update(jnp.array([3.0]), tx.init(jnp.zeros(1)))[0][0]), 6)
    -0.003162
    """
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize),
        optax.scale_by_adadelta(rho, eps),
        scale_by_learning_rate(learning_rate),
    )
