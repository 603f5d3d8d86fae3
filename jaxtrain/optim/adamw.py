"""Adam and AdamW with the arithmetic of `torch.optim.Adam` and `AdamW` (`torch/optim/adam.py`, `torch/optim/adamw.py`).

In float64 `optax.adamw` is the same. In float32 it computes the bias correction 1 − β₂ᵗ as one minus a float32 power,
which at t = 1 has five digits of 0.001, while PyTorch computes it in double. Measured on a perceptron over 20 updates,
optax's float32 parameters are hundreds of times further from the float64 reference than PyTorch's. `optax.amsgrad` is
a different algorithm in any precision: it takes the maximum of the bias-corrected second moments, PyTorch that of the
raw ones.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.moments import average, one_minus_power, squares, value_at
from jaxtrain.optim.preprocessing import Mask, gradient_preprocessing
from jaxtrain.step import LearningRate, scale_by_learning_rate


class AdamState(NamedTuple):
    """State of `scale_by_adam`.

    Attributes:
      count: int32[], updates so far.
      mu: Moving average of the gradients.
      nu: Moving average of the squared gradients.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any


class AmsgradState(NamedTuple):
    """State of `scale_by_adam(amsgrad=True)`.

    Attributes:
      count: int32[], updates so far.
      mu: Moving average of the gradients.
      nu: Moving average of the squared gradients.
      nu_max: Elementwise maximum of `nu` so far.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any
    nu_max: Any


@optimizer
def adam(
    learning_rate: LearningRate = 1e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    moments_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam, as `torch.optim.Adam`: the weight decay is part of the gradient and so of the moments.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      mask: What decays: a pytree of booleans, or a function from the parameters to one, as in `optax.adamw`.
      amsgrad: Whether to use the maximum of the second moments so far.
      maximize: Whether to maximize the objective: the gradient is negated.
      moments_dtype: Dtype that the moments are stored in, rounded once per update and computed in the gradients'
        dtype; None for the gradients'. In bfloat16 a `b2` above 0.99 changes `nu` by less than its last digit, so that
        it stalls.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adam(0.1, weight_decay=1.0)
      >>> params = jnp.array([1.0])
      >>> updates, _ = tx.update(jnp.array([3.0]), tx.init(params), params)
      >>> round(float(updates[0]), 6)
      -0.1
    """
    return optax.chain(
        *gradient_preprocessing(weight_decay, maximize, mask),
        scale_by_adam(b1, b2, eps, amsgrad=amsgrad, moments_dtype=moments_dtype),
        scale_by_learning_rate(learning_rate),
    )


@optimizer
def adamw(
    learning_rate: LearningRate = 1e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Mask = None,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    moments_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW, as `torch.optim.AdamW(params, learning_rate, (b1, b2), eps, weight_decay)`, with PyTorch's defaults.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Decoupled weight decay.
      mask: What decays: a pytree of booleans, or a function from the parameters to one, as in `optax.adamw`.
      amsgrad: Whether to use the maximum of the second moments so far.
      maximize: Whether to maximize the objective: the gradient is negated.
      moments_dtype: Dtype that the moments are stored in, rounded once per update and computed in the gradients'
        dtype; None for the gradients'. In bfloat16 a `b2` above 0.99 changes `nu` by less than its last digit, so that
        it stalls.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adamw(0.1, weight_decay=0.0)
      >>> params = jnp.array([1.0])
      >>> updates, _ = tx.update(jnp.array([3.0]), tx.init(params), params)
      >>> round(float(updates[0]), 6)      # the first update is the learning rate, for any gradient
      -0.1
    """
    return optax.chain(
        *gradient_preprocessing(0.0, maximize),
        scale_by_adam(b1, b2, eps, amsgrad=amsgrad, moments_dtype=moments_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    amsgrad: bool = False,
    moments_dtype: Any = None,
) -> optax.GradientTransformation:
    """Scale gradients by Adam: m̂ / (√v̂ + eps).

    With a schedule for `b1` the bias is corrected by the power of its current value, as in PyTorch.

    Args:
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      amsgrad: Whether to use the maximum of the second moments so far.
      moments_dtype: Dtype that the moments are stored in; None for the gradients'.

    Returns:
      An optax transformation.

    References:
      Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, Algorithm 1.
    """

    def init(params: Any) -> AdamState | AmsgradState:
        def moment() -> Any:
            return jax.tree.map(lambda p: jnp.zeros_like(p, moments_dtype), params)

        adam_state = AdamState(jnp.zeros([], np.int32), moment(), moment())
        return AmsgradState(*adam_state, moment()) if amsgrad else adam_state

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, AdamState | AmsgradState]:
        del params
        beta1 = value_at(b1, state.count)
        count = optax.safe_increment(state.count)
        mu = average(beta1, _like(state.mu, grads), grads)
        nu = average(b2, _like(state.nu, grads), squares(grads))
        bound = jax.tree.map(jnp.maximum, _like(state.nu_max, grads), nu) if amsgrad else nu

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            t = count.astype(m.dtype)
            root = jnp.sqrt(v) / jnp.sqrt(one_minus_power(b2, t))
            return m / one_minus_power(beta1, t) / (root + eps)

        def stored(moment: Any) -> Any:
            return moment if moments_dtype is None else jax.tree.map(lambda m: m.astype(moments_dtype), moment)

        new = AdamState(count, stored(mu), stored(nu))
        return jax.tree.map(direction, mu, bound), AmsgradState(*new, stored(bound)) if amsgrad else new

    return optax.GradientTransformation(init, update)


def _like(moments: Any, grads: Any) -> Any:
    return jax.tree.map(lambda m, g: m.astype(g.dtype), moments, grads)
