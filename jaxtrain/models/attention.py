"""Attention (Vaswani et al. 2017), as `torch.nn.functional.scaled_dot_product_attention` computes it.

JAX's own, `jax.nn.dot_product_attention`, takes its softmax in float32 even of float64, and averages over what a fully
masked row masks; so it is used only for what it brings, cuDNN's fused kernel.
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
    """softmax(q kᵀ · scale) v: queries [B, T, N, H], keys and values [B, S, K, H] → [B, T, N, H], in their dtype.

    Query head n attends to head n // (N / K) of the keys (grouped queries, Ainslie et al. 2023, as `enable_gqa`).
    `mask` is boolean, broadcastable to [B, N, T, S] and of as many axes, True where to attend; with `causal`, too,
    query t sees keys 0 … t only (aligned top left, where T ≠ S as well). A row that sees nothing is 0, and has no
    gradient. `scale` is 1 / √H by default. With a key, weights are dropped at the rate `dropout`. The softmax is at
    least float32. Raises `UserError` where N is no multiple of K.

    >>> q, kv = jnp.ones((1, 2, 4, 8)), jnp.arange(2.0).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 2, 8))
    >>> attention(q, kv, kv, causal=True)[0, :, 0, 0].tolist() == [0.0, float(jax.nn.sigmoid(8**0.5))]
    True
    """
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads do not divide into groups for {k.shape[2]} key heads: change one")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dropping = rng is not None and dropout > 0.0
    if mask is None and not dropping and _has_fused_kernel(q, k, v):
        return _fused(causal, scale)(q, k, v)
    return _explicit(q, k, v, mask, causal, scale, dropout, rng)


def segment_mask(q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
    """The mask by which tokens of sequences packed into one row attend to their own: segment ids, integers [B, T] and
    [B, S] → bool [B, 1, T, S].

    >>> segment_mask(jnp.array([[1, 2]]), jnp.array([[1, 2]]))[0, 0].tolist()
    [[True, False], [False, True]]
    """
    return (q_segments[:, :, None] == k_segments[:, None, :])[:, None]


def _has_fused_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes these, in low precision, on the GPU that this process has: forwards and
    backwards."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    return fits and jax.local_devices()[0].device_kind.startswith("NVIDIA")


@functools.cache
def _fused(causal: bool, scale: float) -> Callable[..., jax.Array]:
    """An operation of autocast's low-precision list (`scaled_dot_product_attention` in
    `aten/src/ATen/autocast_mode.h`): the dtype that decides on the kernel is the one it is computed in."""

    def computed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            return _explicit(q, k, v, None, causal, scale, 0.0, None)
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn")

    return low_precision(computed)


def _explicit(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    attended = _attended(mask, causal, t, s)
    if attended is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.where(attended, scores, jnp.finfo(scores.dtype).min), axis=-1)
        # Uniform in a row masked whole; a causal mask alone leaves none.
        weights = weights if mask is None else jnp.where(attended, weights, 0)
    weights = _dropout(weights.astype(v.dtype), dropout, rng).reshape(b, heads, n // heads, t, s)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def _attended(mask: jax.Array | None, causal: bool, t: int, s: int) -> jax.Array | np.ndarray | None:
    if not causal:
        return mask
    lower = np.tril(np.ones((1, 1, t, s), bool))
    return lower if mask is None else mask & lower
