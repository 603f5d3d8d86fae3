"""AdamW with the arithmetic of `torch.optim.AdamW` (`torch/optim/adamw.py`, `torch/optim/adam.py`).

In float64 `optax.adamw` is the same. In float32 it is not: it takes the bias correction 1 − β₂ᵗ as one minus a float32
power, which at t = 1 keeps five digits of 0.001, while PyTorch takes it in double. Measured on a perceptron over 20
updates, that puts optax's float32 parameters hundreds of times further from the float64 truth than PyTorch's.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.learning_rate import scale_by_learning_rate


class AdamState(NamedTuple):
    """`count` int32[], updates so far; `mu` and `nu`, like the parameters: the moving averages of g and g²."""

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """`torch.optim.AdamW(params, learning_rate, (b1, b2), eps, weight_decay)`, with PyTorch's defaults.

    `learning_rate` may be a schedule of the updates made so far. `mask` chooses what decays, as in `optax.adamw`.

    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> params = jnp.array([1.0])
    >>> updates, _ = tx.update(jnp.array([3.0]), tx.init(params), params)
    >>> round(float(updates[0]), 6)      # the first update is the learning rate, whatever the gradient
    -0.1
    """
    return optax.chain(
        scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Gradients to Adam's directions: m̂ / (√v̂ + eps), as Algorithm 1 of Kingma and Ba (2015) has it."""

    def init(params: Any) -> AdamState:
        return AdamState(
            jnp.zeros([], np.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * g), state.nu, grads)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            t = count.astype(m.dtype)
            root = jnp.sqrt(v) / jnp.sqrt(_one_minus_power(b2, t))
            return m / _one_minus_power(b1, t) / (root + eps)

        return jax.tree.map(direction, mu, nu), AdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _one_minus_power(b: float, t: jax.Array) -> jax.Array:
    """1 − bᵗ to the last digits of t's dtype."""
    return -jnp.expm1(t * math.log(b)) if b else jnp.ones_like(t)
