"""Layer normalization (Ba et al. 2016), as `torch.nn.LayerNorm` computes it.

flax's layer computes the variance as E[x²] − E[x]² by default, which loses all digits where the mean is large, and
multiplies the scale by the inverse standard deviation first, for which XLA:CPU broadcasts the scale to every token.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.transforms import recomputed


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis: (x − mean) / √(var + ε) · scale + bias.

    It is computed in float32 at least and rounded once.

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
        scale, bias = (p[...].reshape(axes) for p in (self.scale, self.bias))
        normalized: jax.Array = recomputed(partial(_normalize, epsilon=self.epsilon))(x, scale, bias)
        return normalized


def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float) -> jax.Array:
    wide_dtype = np.promote_types(x.dtype, np.float32)
    wide, scale, bias = (value.astype(wide_dtype) for value in (x, scale, bias))
    centered = wide - wide.mean(-1, keepdims=True)
    normalized = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + epsilon)
    return (normalized * scale + bias).astype(x.dtype)
