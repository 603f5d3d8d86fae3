"""Layer normalisation (Ba et al. 2016), as `torch.nn.LayerNorm` computes it.

flax's computes the variance as E[x²] − E[x]², which loses all digits where the mean is large, unless told otherwise;
and multiplies the scale by the standard deviation first, for which XLA's CPU backend writes out the scale for every
token.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class LayerNorm(nnx.Module):
    """(x − mean) / √(var + ε) · scale + bias over the last axis: [..., features] → the same.

    >>> LayerNorm(2, 0.0)(jnp.array([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(self, features: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = (1,) * (x.ndim - 1) + (-1,)
        centred = x - x.mean(-1, keepdims=True)
        normalised = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.epsilon)
        return normalised * self.scale[...].reshape(axes) + self.bias[...].reshape(axes)
