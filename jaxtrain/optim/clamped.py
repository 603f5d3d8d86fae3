"""Clamping as a part of an optimizer, for parameters that have bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clamped(
    optimizer: optax.GradientTransformation, minimum: float | None = None, maximum: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Clamp the parameters after each update, as `p.data.clamp_(minimum, maximum)` after `optimizer.step()` in PyTorch.

    The optimizer returns the difference to the clamped parameters, so these are at a bound up to rounding.

    Args:
      optimizer: An optax transformation.
      minimum: Lower bound of an element; None for no bound.
      maximum: Upper bound of an element; None for no bound.

    Returns:
      An optax transformation with the optimizer's state.

    Example:
      >>> from jaxtrain.optim import sgd
      >>> tx, params = clamped(sgd(1.0), minimum=-0.5, maximum=0.5), jnp.array([0.25, 0.25])
      >>> updates, _ = tx.update(jnp.array([3.0, 0.5]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [-0.5, -0.25]

    References:
      Arjovsky, Chintala, Bottou. "Wasserstein GAN". https://arxiv.org/abs/1701.07875
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("clamped needs the parameters: call update(grads, state, params)")
        updates, new_state = inner.update(grads, state, params, **extra)
        return jax.tree.map(lambda u, p: jnp.clip(p + u, minimum, maximum) - p, updates, params), new_state

    return optax.GradientTransformationExtraArgs(inner.init, update)
