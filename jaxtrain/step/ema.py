"""The exponential moving average of the parameters, as `torch.optim.swa_utils.AveragedModel` keeps it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def moved(average: Any, params: Any, decay: float, first: jax.Array | bool) -> Any:
    """`average` moved towards `params` by 1 − `decay`; at the `first` update it is `params`.

    `get_ema_multi_avg_fn(decay)` of PyTorch, which copies the model the first time. Leaves that are no floats are
    taken over.

    >>> moved({"w": jnp.array([0.0])}, {"w": jnp.array([1.0])}, decay=0.75, first=False)["w"].tolist()
    [0.25]
    """

    def move(a: jax.Array, p: jax.Array) -> jax.Array:
        if not jnp.issubdtype(p.dtype, np.inexact):
            return p
        return jnp.where(first, p, a + (1 - decay) * (p - a))

    return jax.tree.map(move, average, params)
