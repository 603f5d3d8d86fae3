"""Attention (Vaswani et al. 2017), as `torch.nn.functional.scaled_dot_product_attention` computes it.

`jax.nn.dot_product_attention` computes its softmax in float32 even for float64, and averages over the masked keys of a
fully masked row. Programs compiled for CUDA in bfloat16 or float16 call cuDNN's kernel instead (`fused_attention`).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.models.dropout import dropout as _dropout
from jaxtrain.models.fused_attention import Given, Options, fused_attention, is_supported, present, visible
from jaxtrain.transforms import low_precision


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q kᵀ · scale + bias) v, the softmax in float32 at least.

    Query head n attends to key head n // (N / K): grouped queries (Ainslie et al. 2023), as `enable_gqa=True`. The
    output of a query that may attend to no key is 0 and has no gradient.

    A program compiled for a GPU of compute capability 8.0 or more computes this by cuDNN's fused kernel in bfloat16 and
    float16, without storing the scores: with any mask, window and number of groups, for widths of heads that are a
    multiple of 8 up to 128 (256 from 9.0 on); with a `mask` for even T and S; with a `bias` [1 or B, 1 or N, T, S] for
    even T and S from 9.0 on; without dropout.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, V], where V may differ from H.
      mask: bool, of four axes broadcastable to [B, N, T, S], True where a query attends to a key.
      bias: Added to the scores, of four axes broadcastable to [B, N, T, S].
      causal: Whether query t attends to keys 0 … t only, also where T ≠ S; combined with `mask`.
      window: With `causal`, the number of keys up to its own that a query attends to; None for all.
      scale: Factor of the scores; None for 1 / √H.
      dropout: Rate at which attention weights are dropped when there is an `rng`.
      rng: Key of the dropout mask, or None for no dropout.

    Returns:
      [B, T, N, V], in the dtype of the values.

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
    if window is not None and not causal:
        raise UserError(f"window {window} needs causal=True: pass it, or a mask")
    dropping = rng is not None and dropout > 0.0
    if not dropping and is_supported(q, k, v, mask, bias):
        given = Given(mask is not None, bias is not None)
        return _fused_on_cuda(causal, window, scale, given)(q, k, v, *present(mask, bias))
    return scaled_dot_product_attention(
        q, k, v, mask, bias, causal=causal, window=window, scale=scale, dropout=dropout, rng=rng
    )


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


@functools.cache
def _fused_on_cuda(causal: bool, window: int | None, scale: float, given: Given) -> Callable[..., jax.Array]:
    """Return attention as an operation of autocast's low-precision list.

    PyTorch lists `scaled_dot_product_attention` there as well (`aten/src/ATen/autocast_mode.h`), so that a bias is
    rounded too.
    """
    formula = functools.partial(scaled_dot_product_attention, causal=causal, window=window, scale=scale)
    options = Options(causal, scale, window, formula)

    def with_given(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def attention_of(q: jax.Array, k: jax.Array, v: jax.Array, *operands: jax.Array) -> jax.Array:
            return attend(q, k, v, *given.split(operands)[:2])

        return attention_of

    return low_precision(with_given(formula), with_given(functools.partial(fused_attention, options)))


def scaled_dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Compute the formula of `attention`, with all of its scores."""
    (b, t, n, h), (_, s, heads, _) = q.shape, k.shape
    grouped = q.reshape(b, t, heads, n // heads, h)
    wide = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide).reshape(b, n, t, s) * scale
    scores = scores if bias is None else scores + bias.astype(scores.dtype)
    attended = _combined_mask(mask, causal, window, t, s)
    if attended is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.where(attended, scores, jnp.finfo(scores.dtype).min), axis=-1)
        # The softmax of a fully masked row is uniform. A causal mask alone leaves no such row.
        weights = weights if mask is None else jnp.where(attended, weights, 0)
    weights = _dropout(weights.astype(v.dtype), dropout, rng).reshape(b, heads, n // heads, t, s)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, v.shape[-1])


def _combined_mask(
    mask: jax.Array | None, causal: bool, window: int | None, t: int, s: int
) -> jax.Array | np.ndarray | None:
    if not causal:
        return mask
    lower = visible(t, s, window)
    return lower if mask is None else mask & lower
