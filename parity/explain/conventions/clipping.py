"""Conventions of gradient clipping: what JAX code may do in place of `torch.nn.utils.clip_grad_norm_`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxtrain.step import clip_grad_norm, clip_grad_value


@dataclass(frozen=True)
class ClippingConvention:
    """What JAX `has`, what to `change` there, and the gradients it computes from gradients and bound."""

    has: str
    change: str
    clipped: Callable[[Any, float], Any]


def _always(grads: Any, bound: float) -> Any:
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * bound / (norm + 1e-6), grads)


CLIPPING: tuple[ClippingConvention, ...] = (
    ClippingConvention(
        "factor has no 1e-6",
        "bound / (norm + 1e-6)",
        lambda g, bound: optax.clip_by_global_norm(bound).update(g, optax.EmptyState())[0],
    ),
    ClippingConvention(
        "norm is each leaf's",
        "the norm of all",
        lambda g, bound: jax.tree.map(lambda x: clip_grad_norm(x, bound)[0], g),
    ),
    ClippingConvention("clipping is by value", "by the norm", clip_grad_value),
    ClippingConvention("gradients are not clipped", "jaxtrain.step.update.clip.clip_grad_norm", lambda g, bound: g),
    ClippingConvention("factor may be over 1", "min(1, …)", _always),
    ClippingConvention(
        "bound is for the norm's square", "bound / norm", lambda g, bound: clip_grad_norm(g, math.sqrt(bound))[0]
    ),
)
"""Tried in this order. In a diagnosis, the text of `has` follows "JAX's"."""
