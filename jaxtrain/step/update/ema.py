"""Exponential moving average of the parameters, as `torch.optim.swa_utils.AveragedModel`.

It is float32 for parameters in bfloat16, which would lose what an update adds to it: a factor of 1 − decay of a change
in the last digits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.step.update.float32_arithmetic import widen


def init_ema(params: Any) -> Any:
    """Return the average before the first update: a copy of the parameters, at least in float32."""
    return jax.tree.map(jnp.copy, widen(params))


def update_ema(ema: Any, params: Any, decay: float, is_first: jax.Array | bool) -> Any:
    """Update a moving average of parameters, as PyTorch's `get_ema_multi_avg_fn(decay)`.

    Args:
      ema: Pytree of averages, as of `init_ema`.
      params: Pytree of parameters.
      decay: Decay in [0, 1).
      is_first: Whether this is the first update, which copies the parameters.

    Returns:
      decay · ema + (1 − decay) · params. Leaves that are not floating-point are copied from `params`.

    Example:
      >>> ema, params = {"w": jnp.array([0.0])}, {"w": jnp.array([1.0])}
      >>> update_ema(ema, params, decay=0.75, is_first=False)["w"].tolist()
      [0.25]
    """

    def average(a: jax.Array, p: jax.Array) -> jax.Array:
        if not jnp.issubdtype(p.dtype, np.inexact):
            return p
        return jnp.where(is_first, p, a + (1 - decay) * (p - a))

    return jax.tree.map(average, widen(ema), widen(params))
