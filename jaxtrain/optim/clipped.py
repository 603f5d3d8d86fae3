"""Clipping as a part of an optimizer, for bounds that one of several optimizers has."""

from typing import Any

import optax

from jaxtrain.step import clip_grad_norm, clip_grad_value


def clipped(
    optimizer: optax.GradientTransformation, max_norm: float | None = None, max_value: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradients that an optimizer updates by, as `clip_grad_norm_` and `clip_grad_value_` of PyTorch.

    `train_step(clip_norm=1.0)` clips those of all parameters.

    Args:
      optimizer: An optax transformation.
      max_norm: Upper bound of the norm of its gradients; None for no bound.
      max_value: Upper bound of the magnitude of an element; None for no bound.

    Returns:
      An optax transformation with the optimizer's state.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.optim import sgd
      >>> tx = clipped(sgd(1.0), max_value=0.5)
      >>> updates, _ = tx.update(jnp.array([3.0, -0.2]), tx.init(jnp.zeros(2)), jnp.zeros(2))
      >>> updates.tolist()
      [-0.5, 0.20000000298023224]

    References:
      `torch/nn/utils/clip_grad.py`.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        grads, _ = clip_grad_norm(grads, max_norm)
        return inner.update(clip_grad_value(grads, max_value), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
