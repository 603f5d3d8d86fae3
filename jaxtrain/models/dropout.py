"""Dropout (Srivastava et al. 2014), as `torch.nn.functional.dropout` has it."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """`x` with each element zero at probability `rate`, the others larger by 1 / (1 − rate); `x` itself without a key.

    >>> sorted(set(dropout(jnp.ones(100), 0.5, jax.random.key(0)).tolist()))
    [0.0, 2.0]
    """
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
