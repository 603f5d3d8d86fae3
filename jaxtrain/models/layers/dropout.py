"""Dropout (Srivastava et al. 2014), as `torch.nn.functional.dropout`."""

import jax
import jax.numpy as jnp
import numpy as np


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Set elements of `x` to 0 with probability `rate` and multiply the others by 1 / (1 − rate).

    Without a key, or with rate 0, `x` is returned as it is.

    Example:
      >>> sorted(set(dropout(jnp.ones(100), 0.5, jax.random.key(0)).tolist()))
      [0.0, 2.0]
    """
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    # In float32 at least: 1 − rate is not a number of bfloat16.
    scaled = (x.astype(np.promote_types(x.dtype, np.float32)) / (1.0 - rate)).astype(x.dtype)
    return jnp.where(keep, scaled, jnp.zeros_like(x))
