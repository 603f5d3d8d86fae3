"""Gradient clipping as `torch.nn.utils.clip_grad_norm_` does it (`torch/nn/utils/clip_grad.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_grad_norm(grads: Any, max_norm: float | None) -> tuple[Any, jax.Array]:
    """`grads` scaled so that their global norm is at most `max_norm`, and the norm they had before.

    The factor is min(1, max_norm / (norm + 1e-6)); optax's has no 1e-6. None measures only.

    >>> grads, norm = clip_grad_norm({"w": jnp.array([3.0, 4.0])}, max_norm=1.0)
    >>> round(float(norm), 6), round(float(optax.tree.norm(grads)), 6)
    (5.0, 1.0)
    """
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), norm
