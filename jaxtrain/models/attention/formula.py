"""The formula of attention (Vaswani et al. 2017), with all of its scores.

`jax.nn.dot_product_attention` computes its softmax in float32 even for float64, and averages over the masked keys of a
fully masked row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.dropout_mask import kept_of_rows
from jaxtrain.models.layers.dropout import dropout as _dropout

_LARGE = 2**20
"""Number of elements from which a mask is computed when a program runs, instead of being a constant of the program."""


def formula(
    options: Options, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, rng: jax.Array | None = None
) -> jax.Array:
    """Compute attention.

    Args:
      options: What is computed.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H], where K divides N.
      v: Values [B, S, K, V].
      operands: The other arrays; `rng` in them is another form of the argument.
      rng: Key of the dropout mask, or None.

    Returns:
      [B, T, N, V], in the dtype of the values.
    """
    scores, attended = _scores(options, q, k, operands)
    (b, n, t, s), heads = scores.shape, k.shape[2]
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks.astype(scores.dtype)[:, :, None, None], (b, n, t, 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :s]
    if attended is not None and _may_see_nothing(options, operands, t, s):
        weights = jnp.where(attended, weights, 0)  # the softmax of a fully masked row is uniform
    weights = weights.astype(v.dtype)
    if operands.rng is not None:
        keep = kept_of_rows(options.dropout, operands.rng, (n, t, s))
        weights = jnp.where(keep, weights / (1.0 - options.dropout), jnp.zeros_like(weights))
    weights = _dropout(weights, options.dropout, rng).reshape(b, heads, n // heads, t, s)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, v.shape[-1])


def log_sum_exp(options: Options, q: jax.Array, k: jax.Array, operands: Operands) -> jax.Array:
    """Return the logarithm [B, N, T] of the sum of the exponentials of the scores; -inf for a query without keys."""
    scores, attended = _scores(options, q, k, operands)
    scores = scores if attended is None else jnp.where(attended, scores, -jnp.inf)
    if operands.sinks is None:
        return jax.nn.logsumexp(scores, axis=-1)
    sinks = jnp.broadcast_to(operands.sinks.astype(scores.dtype)[:, :, None, None], (*scores.shape[:3], 1))
    return jax.nn.logsumexp(jnp.concatenate([scores, sinks], axis=-1), axis=-1)


def combined_mask(
    mask: jax.Array | None, q_segments: jax.Array | None, k_segments: jax.Array | None
) -> jax.Array | None:
    """Return the mask of equal segments and of `mask`, where they are given."""
    if q_segments is None or k_segments is None:
        return mask
    segments = segment_mask(q_segments, k_segments)
    return segments if mask is None else mask & segments


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


def visible(t: int, s: int, window: int | None) -> Any:
    """Return bool [1, 1, T, S]: the keys that a causal query attends to.

    >>> visible(3, 3, 2)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    numpy: Any = np if t * s < _LARGE else jnp
    lower = numpy.tril(numpy.ones((1, 1, t, s), bool))
    return lower if window is None else numpy.triu(lower, 1 - window)


def _scores(
    options: Options, q: jax.Array, k: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array | np.ndarray | None]:
    """Return the scores [B, N, T, S], in float32 at least, and which of them are attended to; None for all."""
    (b, t, n, h), (_, s, heads, _) = q.shape, k.shape
    grouped = q.reshape(b, t, heads, n // heads, h)
    wide = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=wide).reshape(b, n, t, s)
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    scores = scores if operands.bias is None else scores + operands.bias.astype(scores.dtype)
    attended = _attended(options, operands, t, s)
    return scores if attended is None else jnp.where(attended, scores, jnp.finfo(scores.dtype).min), attended


def _attended(options: Options, operands: Operands, t: int, s: int) -> jax.Array | np.ndarray | None:
    mask = combined_mask(operands.mask, operands.q_segments, operands.k_segments)
    if not options.causal:
        return mask
    if operands.q_positions is None and operands.k_positions is None:
        lower: Any = visible(t, s, options.window)
    else:
        own, other = (
            np.arange(n)[None] if positions is None else positions
            for positions, n in ((operands.q_positions, t), (operands.k_positions, s))
        )
        distance = own[:, None, :, None] - other[:, None, None]
        lower = distance >= 0 if options.window is None else (distance >= 0) & (distance < options.window)
    return lower if mask is None else mask & lower


def _may_see_nothing(options: Options, operands: Operands, t: int, s: int) -> bool:
    """Return whether a query may attend to no key, which causality alone does not cause."""
    given = operands.mask, operands.q_segments, operands.q_positions, operands.k_positions
    return any(x is not None for x in given) or (options.window is not None and t > s)
