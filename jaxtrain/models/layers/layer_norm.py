"""Layer normalization (Ba et al. 2016), as `torch.nn.LayerNorm` computes it.

flax's layer computes the variance as E[x²] − E[x]² by default, which loses all digits where the mean is large, and
multiplies the scale by the inverse standard deviation first, for which XLA:CPU broadcasts the scale to every token.

On a GPU, XLA's derivative of a norm reads and writes the activations many times: it computes the statistics of the
tokens in every kernel that needs them, and the factors of the scale's gradient in a kernel of their own.
`layer_norm_gradient` reads the activations twice: all statistics of a token are one reduction, and what follows is
elementwise or summed over tokens, which XLA fuses.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.passes import recomputed


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
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Normalize the last axis of x by a scale and a bias [features]."""
    axes = (1,) * (x.ndim - 1) + (-1,)
    normalize = recomputed(partial(_normalize, epsilon=epsilon), on_gpu=layer_norm_gradient)
    normalized: jax.Array = normalize(x, scale.reshape(axes), bias.reshape(axes))
    return normalized


def _normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float) -> jax.Array:
    wide_dtype = np.promote_types(x.dtype, np.float32)
    wide, scale, bias = (value.astype(wide_dtype) for value in (x, scale, bias))
    centered = wide - wide.mean(-1, keepdims=True)
    normalized = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + epsilon)
    return (normalized * scale + bias).astype(x.dtype)


def layer_norm_gradient(
    x: jax.Array, scale: jax.Array, bias: jax.Array, cotangent: jax.Array, *, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of a layer normalization for x, scale and bias.

    Scale and bias have as many axes as x, all but the last of size 1.
    """
    wide_dtype = np.promote_types(x.dtype, np.float32)
    wide, scale_, d = (value.astype(wide_dtype) for value in (x, scale, cotangent))
    weighted = d * scale_
    mean, weighted_mean, variance, covariance = _moments(wide, weighted)
    inverse = lax.rsqrt(variance + epsilon)
    normalized = (wide - mean) * inverse
    dx = inverse * (weighted - weighted_mean - normalized * (covariance * inverse))
    tokens = tuple(range(x.ndim - 1))
    sums = (value.sum(tokens, keepdims=True) for value in (d * normalized, d))
    dscale, dbias = (total.astype(of.dtype) for total, of in zip(sums, (scale, bias), strict=True))
    return dx.astype(x.dtype), dscale, dbias


def _moments(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """Return the means of x and y, the variance of x and their covariance over the last axis, in one reduction."""
    zeros = jnp.zeros_like(x)
    start = jnp.zeros([], x.dtype)
    reduced = lax.reduce((jnp.ones_like(x), x, y, zeros, zeros), (start,) * 5, merged_moments, (x.ndim - 1,))
    _, mean_x, mean_y, xx, xy = (value[..., None] for value in reduced)
    return [mean_x, mean_y, xx / x.shape[-1], xy / x.shape[-1]]


def merged_moments(a: Any, b: Any) -> Any:
    """Return the moments of two parts together, by the difference of their means (Chan et al. 1983).

    A large mean costs no digits.

    Args:
      a: Of a part, its number of pairs x, y, the means of x and y, and the sums of (x − mean)² and of the products.
      b: Of the other part, likewise.
    """
    (n, mean_x, mean_y, xx, xy), (n_b, mean_x_b, mean_y_b, xx_b, xy_b) = a, b
    total = n + n_b
    share = n_b / jnp.maximum(total, 1)
    dx, dy, weight = mean_x_b - mean_x, mean_y_b - mean_y, n * share
    means = mean_x + dx * share, mean_y + dy * share
    return total, *means, xx + xx_b + dx * dx * weight, xy + xy_b + dx * dy * weight
