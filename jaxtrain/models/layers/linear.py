"""Linear layers that merge all axes before the last for the product.

The product is the same, but for activations with more axes XLA:CPU copies a transpose before it computes the gradient
of the weight, which then takes twice as long: 0.60 ms instead of 0.30 ms for [12, 64, 128] by [128, 512].
"""

from typing import Any

import jax
from flax import nnx


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply x [..., n] by a kernel [n, m].

    Example:
      >>> import jax.numpy as jnp
      >>> product(jnp.ones((2, 5, 3)), jnp.ones((3, 4))).shape
      (2, 5, 4)
    """
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nnx.Linear):
    """`nnx.Linear` that computes its product over merged rows: [..., n] → [..., m]."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        rows: jax.Array = super().__call__(inputs.reshape(-1, inputs.shape[-1]), out_sharding)
        return rows.reshape(*inputs.shape[:-1], rows.shape[-1])
