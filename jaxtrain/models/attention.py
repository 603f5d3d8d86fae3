"""Attention (Vaswani et al. 2017), as `torch.nn.functional.scaled_dot_product_attention` computes it.

`jax.nn.dot_product_attention` computes its softmax in float32 even for float64, and averages over the masked keys of a
fully masked row. It is used only where it calls cuDNN's fused kernel.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.models.dropout import dropout as _dropout
from jaxtrain.transforms import low_precision


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q kᵀ · scale) v, the softmax in float32 at least.

    Query head n attends to key head n // (N / K): grouped queries (Ainslie et al. 2023), as `enable_gqa=True`. The
    output of a query that may attend to no key is 0 and has no gradient.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, H].
      mask: bool, of four axes broadcastable to [B, N, T, S], True where a query attends to a key.
      causal: Whether query t attends to keys 0 … t only, also where T ≠ S; combined with `mask`.
      scale: Factor of the scores; None for 1 / √H.
      dropout: Rate at which attention weights are dropped when there is an `rng`.
      rng: Key of the dropout mask, or None for no dropout.

    Returns:
      [B, T, N, H], in the dtype of the values.

    Raises:
      UserError: N is not a multiple of K.

    Example:
      >>> q, kv = jnp.ones((1, 2, 4, 8)), jnp.arange(2.0).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 2, 8))
      >>> attention(q, kv, kv, causal=True)[0, :, 0, 0].tolist() == [0.0, float(jax.nn.sigmoid(8**0.5))]
      True
    """
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads are not divisible by {k.shape[2]} key heads: change one of them")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dropping = rng is not None and dropout > 0.0
    if mask is None and not dropping and _has_fused_kernel(q, k, v):
        return _fused(causal, scale)(q, k, v)
    return _explicit(q, k, v, mask=mask, causal=causal, scale=scale, dropout=dropout, rng=rng)


def segment_mask(q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
    """Return the mask by which tokens of packed sequences attend to their own sequence only.

    Args:
      q_segments: Segment of every query, int [B, T].
      k_segments: Segment of every key, int [B, S].

    Returns:
      bool [B, 1, T, S], True where the segments are equal.

    Example:
      >>> segment_mask(jnp.array([[1, 2]]), jnp.array([[1, 2]]))[0, 0].tolist()
      [[True, False], [False, True]]
    """
    return (q_segments[:, :, None] == k_segments[:, None, :])[:, None]


def _has_fused_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether the local GPU has cuDNN's flash attention, forward and backward, for these shapes in low precision."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    return fits and jax.local_devices()[0].device_kind.startswith("NVIDIA")


@functools.cache
def _fused(causal: bool, scale: float) -> Callable[..., jax.Array]:
    """Return attention as an operation of autocast's low-precision list, which chooses the kernel by its dtype.

    PyTorch lists `scaled_dot_product_attention` there as well (`aten/src/ATen/autocast_mode.h`).
    """

    def computed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            return _explicit(q, k, v, mask=None, causal=causal, scale=scale, dropout=0.0, rng=None)
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn")

    return low_precision(computed)


def _explicit(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    causal: bool,
    scale: float,
    dropout: float,
    rng: jax.Array | None,
) -> jax.Array:
    (b, t, n, h), (_, s, heads, _) = q.shape, k.shape
    grouped = q.reshape(b, t, heads, n // heads, h)
    wide = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide).reshape(b, n, t, s) * scale
    attended = _combined_mask(mask, causal, t, s)
    if attended is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.where(attended, scores, jnp.finfo(scores.dtype).min), axis=-1)
        # The softmax of a fully masked row is uniform. A causal mask alone leaves no such row.
        weights = weights if mask is None else jnp.where(attended, weights, 0)
    weights = _dropout(weights.astype(v.dtype), dropout, rng).reshape(b, heads, n // heads, t, s)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def _combined_mask(mask: jax.Array | None, causal: bool, t: int, s: int) -> jax.Array | np.ndarray | None:
    if not causal:
        return mask
    lower = np.tril(np.ones((1, 1, t, s), bool))
    return lower if mask is None else mask & lower
