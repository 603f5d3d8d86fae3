"""Gradient clipping as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` (`torch/nn/utils/clip_grad.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_grad_norm(grads: Any, max_norm: float | None) -> tuple[Any, jax.Array]:
    """Clip gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`.

    The factor is min(1, max_norm / (norm + 1e-6)); that of optax has no 1e-6.

    Args:
      grads: Pytree of gradients.
      max_norm: Upper bound of the global norm; None only measures it.

    Returns:
      A tuple (clipped gradients, global norm before clipping, float[]).

    Example:
      >>> grads, norm = clip_grad_norm({"w": jnp.array([3.0, 4.0])}, max_norm=1.0)
      >>> round(float(norm), 6), round(float(optax.tree.norm(grads)), 6)
      (5.0, 1.0)
    """
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), norm


def clip_grad_value(grads: Any, max_value: float | None) -> Any:
    """Clip every element of the gradients to ±`max_value`, as `torch.nn.utils.clip_grad_value_`.

    Args:
      grads: Pytree of gradients.
      max_value: Upper bound of an element's magnitude; None leaves the gradients unchanged.

    Returns:
      The clipped gradients.

    Example:
      >>> clip_grad_value({"w": jnp.array([3.0, -0.5])}, max_value=1.0)["w"].tolist()
      [1.0, -0.5]
    """
    if max_value is None:
        return grads
    return jax.tree.map(lambda g: jnp.clip(g, -max_value, max_value), grads)
