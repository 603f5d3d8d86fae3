"""Preprocessing of an optimizer's gradient: its sign, and coupled weight decay."""

from collections.abc import Callable
from typing import Any

import optax

Mask = Any | Callable[[Any], Any] | None
"""Selects the parameters that decay, as in `optax.add_decayed_weights`: a pytree of booleans, or a function to one."""


def gradient_preprocessing(
    weight_decay: float, maximize: bool, mask: Mask = None
) -> list[optax.GradientTransformation]:
    """Return ±g + weight_decay · p, the first lines of PyTorch's optimizers: the decay is not negated."""
    sign = [optax.scale(-1.0)] if maximize else []
    return [*sign, optax.add_decayed_weights(weight_decay, mask)] if weight_decay else sign


def with_weight_decay(
    direction: optax.GradientTransformation, weight_decay: float, decoupled: bool, maximize: bool
) -> list[optax.GradientTransformation]:
    """Add weight decay to `direction`: to its input, the gradient, or, `decoupled`, to its output."""
    coupled, after = (0.0, weight_decay) if decoupled else (weight_decay, 0.0)
    return [*gradient_preprocessing(coupled, maximize), direction, *gradient_preprocessing(after, False)]
