"""The gradient an optimizer sees: negated to maximize, and with the parameters' L2 penalty in it."""

from collections.abc import Callable
from typing import Any

import optax

Mask = Any | Callable[[Any], Any] | None
"""What decays: a tree of booleans, or a function of the parameters to one, as in `optax.add_decayed_weights`."""


def gradient_preprocessing(
    weight_decay: float, maximize: bool, mask: Mask = None
) -> list[optax.GradientTransformation]:
    """±g + weight_decay · p, as every file of `torch/optim` begins: the sign first, so that decay still decays."""
    sign = [optax.scale(-1.0)] if maximize else []
    return [*sign, optax.add_decayed_weights(weight_decay, mask)] if weight_decay else sign


def with_weight_decay(
    direction: optax.GradientTransformation, weight_decay: float, decoupled: bool, maximize: bool
) -> list[optax.GradientTransformation]:
    """What `direction` makes of the gradient, the penalty in that gradient or, `decoupled`, beside the direction."""
    in_gradient, beside = (0.0, weight_decay) if decoupled else (weight_decay, 0.0)
    return [*gradient_preprocessing(in_gradient, maximize), direction, *gradient_preprocessing(beside, False)]
