"""Threefry-2x32 (Salmon et al. 2011), the generator behind JAX's keys, by operations that any kernel has."""

import jax
import numpy as np


def threefry2x32(*words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2x32 with 20 rounds, elementwise.

    Args:
      *words: Two words of the key and two of the counter, uint32.

    Returns:
      The two words of random bits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.extend.random import threefry2x32_p
      >>> words = jnp.arange(4, dtype=np.uint32)
      >>> [int(x) for x in threefry2x32(*words)] == [int(x) for x in threefry2x32_p.bind(*words)]
      True
    """
    first, second, x, y = words
    keys = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits))) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y
