"""Attention (Vaswani et al. 2017), as `torch.nn.functional.scaled_dot_product_attention` computes it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.models.attention import cudnn
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.dropout_mask import counters, is_counter_based
from jaxtrain.models.attention.formula import combined_mask, formula
from jaxtrain.models.attention.primitives import fused_attention, is_long
from jaxtrain.passes import low_operation, low_precision


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q kᵀ · scale + bias) v, the softmax in float32 at least.

    Query head n attends to key head n // (N / K): grouped queries (Ainslie et al. 2023), as `enable_gqa=True`. The
    output of a query that may attend to no key is 0 and has no gradient.

    A program compiled for a GPU of compute capability 8.0 or more computes this by cuDNN's fused kernel in bfloat16 and
    float16, without storing the scores: with any mask, segments, window and number of groups, for widths of heads that
    are a multiple of 8 up to 128 (256 on 9.x); with a `mask` or segments for even T and S; with a `bias`
    [1 or B, 1 or N, T, S] for even T and S from 9.0 on; without dropout, soft cap and sinks. On such GPUs kernels
    written in Pallas compute the rest from T · S = 2¹⁶ on, also in float32, for heads of at most 256 and a `bias`
    [1 or B, 1 or N, T, S]; with a bias or sinks on one GPU and within `jax.shard_map` only. From T · S = 2²⁰ on they
    also compute what has segments or a `mask` [1 or B, 1, 1, S], without an array [T, S].

    Every other program stores all scores of short sequences, and computes long ones block by block, in memory linear in
    T and S: on CPUs from T · S = 2¹⁶ on, on GPUs from 2²⁰. Blocks that causality, the window, the segments or a `mask`
    [1 or B, 1, 1, S] hide entirely are not computed. The dropout masks are the same. Second derivatives store all
    scores. Forward mode (`jax.jvp`) of long attention raises a TypeError, as of every `jax.custom_vjp`.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, V], where V may differ from H.
      mask: bool, of four axes broadcastable to [B, N, T, S], True where a query attends to a key.
      bias: Added to the scores, of four axes broadcastable to [B, N, T, S].
      segments: Segments of the queries, int [1 or B, T], and of the keys, int [1 or B, S]: a query attends to the keys
        of its own segment. Long packed or padded sequences take less memory and time so than with a `mask`.
      sinks: A score for each head, [N], of one more key that all queries attend to and whose value is 0 (gpt-oss).
      causal: Whether query t attends to keys 0 … t only, also where T ≠ S; combined with `mask`.
      window: With `causal`, the number of keys up to its own that a query attends to; None for all.
      softcap: Bound c of the scores before `bias` is added, which become c · tanh(score / c) (Gemma 2); None for none.
      scale: Factor of the scores; None for 1 / √H.
      dropout: Rate at which attention weights are dropped when there is an `rng`.
      rng: Key of the dropout mask, or None for no dropout.

    Returns:
      [B, T, N, V], in the dtype of the values.

    Raises:
      UserError: N is not a multiple of K, or there is a window without `causal`.

    Example:
      >>> q, kv = jnp.ones((1, 2, 4, 8)), jnp.arange(2.0).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 2, 8))
      >>> attention(q, kv, kv, causal=True)[0, :, 0, 0].tolist() == [0.0, float(jax.nn.sigmoid(8**0.5))]
      True
    """
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads are not divisible by {k.shape[2]} key heads: change one of them")
    if window is not None and not causal:
        raise UserError(f"window {window} needs causal=True: pass it, or a mask")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dropping = rng is not None and dropout > 0.0
    precision: Any = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  # mypy knows no settings
    options = Options(scale, causal, window, softcap, dropout if dropping else 0.0, precision=precision)
    q_segments, k_segments = (None, None) if segments is None else segments
    operands = Operands(mask, bias, None if sinks is None else sinks[None], q_segments, k_segments)
    key = rng if dropping else None
    has_sizes = all(isinstance(n, int) for n in (*q.shape, *k.shape))  # those of an export may be symbols
    if has_sizes and is_long(q.shape[1], k.shape[1]) and (key is None or is_counter_based(key)):
        return _attend_long(options, q, k, v, operands, key)
    operands = operands._replace(mask=combined_mask(mask, q_segments, k_segments), q_segments=None, k_segments=None)
    if key is None and cudnn.is_supported(options, q, k, v, operands):
        given, others = operands.split()
        return _fused_on_cuda(options, given)(q, k, v, *others)
    return formula(options, q, k, v, operands, key)


def _attend_long(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, rng: jax.Array | None
) -> jax.Array:
    mask, common = operands.mask, jnp.promote_types(q.dtype, k.dtype)
    if mask is not None and operands.q_segments is None and mask.shape[1:] == (1, 1, k.shape[1]):
        # Blocks of padding are not computed.
        ones = jnp.ones((1, q.shape[1]), np.int32)
        operands = operands._replace(mask=None, q_segments=ones, k_segments=mask[:, 0, 0].astype(np.int32))
    if rng is not None:
        operands = operands._replace(rng=counters(rng, len(q)))
    given, others = operands.split()
    return _in_low_precision(options, given)(q.astype(common), k.astype(common), v, *others)


@functools.cache
def _fused_on_cuda(options: Options, given: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Return attention as an operation of autocast's low-precision list.

    PyTorch lists `scaled_dot_product_attention` there as well (`aten/src/ATen/autocast_mode.h`), so that a bias is
    rounded too.
    """
    return low_precision(_of_arrays(formula, options, given), _of_arrays(fused_attention, options, given))


@functools.cache
def _in_low_precision(options: Options, given: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Return attention as one operation of autocast's low-precision list on every platform."""
    return low_operation(_of_arrays(fused_attention, options, given))


def _of_arrays(attend: Callable[..., jax.Array], options: Options, given: tuple[str, ...]) -> Callable[..., jax.Array]:
    def attention_of(q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
        return attend(options, q, k, v, Operands.joined(given, arrays)[0])

    return attention_of
