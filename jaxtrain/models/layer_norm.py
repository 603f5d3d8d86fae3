"""Layer normalization (Ba et al. 2016), as `torch.nn.LayerNorm` computes it.

flax's layer computes the variance as E[x²] − E[x]² by default, which loses all digits where the mean is large, and
multiplies the scale by the inverse standard deviation first, for which XLA:CPU broadcasts the scale to every token.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.transforms import recomputed


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis, (x − mean) / √(var + ε) · scale + bias.

    Example:
      >>> LayerNorm(2, 0.0)(jnp.array([[1.0, 3.0]])).tolist()
      [[-1.0, 1.0]]
    """

    def __init__(self, features: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = (1,) * (x.ndim - 1) + (-1,)
        return recomputed(partial(_normalize, epsilon=self.epsilon))(
            x, self.scale[...].reshape(axes), self.bias[...].reshape(axes)
        )


def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    normalized = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + epsilon)
    return normalized * scale + bias
