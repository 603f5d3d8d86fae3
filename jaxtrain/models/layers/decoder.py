"""Self-attention of decoders: the keys that a token attends to, and a cache of those of earlier tokens.

Tokens of a row are numbered from 0 on, padding included. A `KVCache` keeps token n in slot n mod S. Layers that attend
to all earlier tokens have a slot for each; layers with a window have no more slots than that, since no later token
attends to what they overwrite. The layers of a model read the cache and return the keys and values of the new tokens,
which are then written for all layers at once: a step copies no cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention import attention, is_long, segment_mask


class Slots(NamedTuple):
    """Keys and values of the layers of one kind, in their order."""

    k: jax.Array
    """Keys [L, B, S, K, H]."""
    v: jax.Array
    """Values [L, B, S, K, H]."""
    segments: jax.Array
    """Segment of every slot, int32 [B, S]; 0 for padding and for unused slots."""


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    The number of slots is static. A cache without slots, as `empty_cache(rows, 0)` of a model returns it, is known to
    be empty when a program is traced: the attention of a prompt is then that of a forward pass, and the cache returned
    holds the whole prompt, for all kinds of layers. `resized` then gives it slots for the tokens to come. Tokens
    written past the last slot of the full layers overwrite the first ones, so the caller must provide enough.
    """

    full: Slots | None
    """Layers that attend to all earlier tokens; None if there are none."""
    sliding: Slots | None
    """Layers that attend to the last tokens only, whose slots need not be more than those; None if there are none."""
    length: jax.Array
    """Number of tokens, int32 []."""

    @classmethod
    def empty(cls, windows: Sequence[int | None], shape: tuple[int, int, int, int], dtype: Any) -> "KVCache":
        """Return a cache without tokens.

        Args:
          windows: Window of each layer, None for a layer that attends to all earlier tokens. All windows are equal.
          shape: Shape of a layer's keys [B, S, K, H]; S is less where a window is.
          dtype: Dtype of the keys and values.
        """

        def slots(layers: int, most: int) -> Slots | None:
            rows, tokens, *heads = shape
            keys = jnp.zeros((layers, rows, min(tokens, most), *heads), dtype)
            return Slots(keys, keys, jnp.zeros((rows, keys.shape[2]), np.int32)) if layers else None

        sliding = [window for window in windows if window is not None]
        full = slots(len(windows) - len(sliding), shape[1])
        return cls(full, slots(len(sliding), min(sliding, default=0)), jnp.zeros([], np.int32))

    def append(self, new: tuple[jax.Array, jax.Array], segments: jax.Array | None, is_sliding: np.ndarray) -> "KVCache":
        """Return the cache with the next T tokens.

        Args:
          new: Keys and values of all layers [L, B, T, K, H].
          segments: Segments of the tokens [B, T]; None for 1.
          is_sliding: bool [L].
        """
        rows, tokens = new[0].shape[1:3]
        of_tokens = _or_ones(segments, rows, tokens)

        def written(slots: Slots | None, layers: np.ndarray) -> Slots | None:
            if slots is None:
                return None
            k, v = (x if layers.all() else x[np.flatnonzero(layers)] for x in new)
            pairs = (slots.k, k), (slots.v, v), (slots.segments, of_tokens)
            return Slots(*(_written(old, new, self.length) for old, new in pairs))

        length = self.length + np.int32(tokens)
        return KVCache(written(self.full, ~is_sliding), written(self.sliding, is_sliding), length)

    def resized(self, like: "KVCache") -> "KVCache":
        """Return the same tokens in the slots of `like`, without those that do not fit into them."""

        def moved(slots: Slots | None, shape: Slots | None) -> Slots | None:
            if slots is None or shape is None:
                return None
            tokens = slot_tokens(self.length, shape.segments.shape[1])
            source = tokens % slots.segments.shape[1]
            k, v, segments = (jnp.take(x, source, axis=_axis(x)) for x in slots)
            return Slots(k, v, jnp.where(tokens[None] >= 0, segments, 0))

        return KVCache(moved(self.full, like.full), moved(self.sliding, like.sliding), self.length)


def slot_tokens(length: Any, slots: int) -> Any:
    """Return the number of the last token of each slot, int [S], after `length` tokens; negative if there is none.

    Example:
      >>> [slot_tokens(length, 4).tolist() for length in (0, 3, 6)]
      [[-4, -3, -2, -1], [0, 1, 2, -1], [4, 5, 2, 3]]
    """
    last = length - np.int32(1)
    return last - (last - np.arange(slots, dtype=np.int32)) % np.int32(slots)


def token_positions(positions: jax.Array | None, tokens: int, cache: KVCache | None) -> jax.Array | np.ndarray:
    """Return positions int [1 or B, T]: those given, or the numbers that follow the cache, or from 0 on."""
    if positions is not None:
        return positions
    count = np.arange(tokens, dtype=np.int32)[None]
    return count if cache is None else cache.length + count


class Visible(NamedTuple):
    """The keys that the queries of the layers of one kind attend to.

    Attributes:
      mask: bool [1 or B, 1, T, S], causal itself; None for a causal mask, with the layers' window.
      segments: Segments of queries and keys, int [B, T] each, beside a causal mask; None for one segment.
      slots: Slots of the earlier tokens; None for none.
      length: Number of earlier tokens, int32 []; None without slots.
    """

    mask: Any = None
    segments: tuple[jax.Array, jax.Array] | None = None
    slots: Slots | None = None
    length: jax.Array | None = None

    def with_mask(self, tokens: int, window: int | None) -> "Visible":
        """Return the same keys by a mask, where there are no earlier tokens."""
        return (
            self
            if self.mask is not None
            else self._replace(mask=_mask_of(tokens, self.segments, window), segments=None)
        )

    def with_earlier(
        self, k: jax.Array, v: jax.Array, layer: jax.Array | None, window: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of earlier tokens and of the new ones, [B, T, K, H], that `mask` is for."""
        if self.slots is None or layer is None:
            return k, v
        old = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (self.slots.k, self.slots.v))
        keys, values = (_with_new(x, new, self.length, window) for x, new in zip(old, (k, v), strict=True))
        return keys, values


def visible_keys(tokens: int, segments: jax.Array | None, window: int | None, cache: KVCache | None = None) -> Visible:
    """Return the keys of a decoder's self-attention, for long sequences without an array [T, T].

    Args:
      tokens: Number of queries T.
      segments: int [B, T]; a token attends to its own segment only. None for one segment, 1 in a cache.
      window: Number of tokens up to its own that a token attends to; None for all.
      cache: Cache of the tokens before these, or None.
    """
    slots = None if cache is None else cache.full if window is None else cache.sliding
    if cache is None or slots is None or slots.k.shape[2] == 0:
        pair = None if segments is None else (segments, segments)
        is_causal = pair is None or is_long(tokens, tokens)
        return Visible(None, pair) if is_causal else Visible(_mask_of(tokens, pair, window))
    numbers, segments = (
        cache.length + np.arange(tokens, dtype=np.int32),
        _or_ones(segments, len(slots.segments), tokens),
    )
    keys = slot_tokens(cache.length + np.int32(tokens), slots.k.shape[2])
    if _is_apart(tokens, window):
        keys = jnp.concatenate([slot_tokens(cache.length, slots.k.shape[2]), numbers])
    mask = _causal_mask(numbers, keys, window) & (keys >= 0)[None, None, None]
    mask = mask & segment_mask(segments, _with_new(slots.segments, segments, cache.length, window))
    return Visible(mask, None, slots, cache.length)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    layer: jax.Array | None,
    rng: jax.Array | None = None,
    *,
    window: int | None,
    dropout: float,
) -> jax.Array:
    """Compute the causal self-attention of a layer.

    Args:
      q: Queries [B, T, N, H].
      k: Keys of the same tokens [B, T, K, H].
      v: Values of the same tokens [B, T, K, V].
      visible: What the queries attend to, from `visible_keys` with the same window.
      layer: Number of the layer among the slots, int []; None without a cache.
      rng: Key of the dropout mask, or None.
      window: Number of tokens up to its own that a token attends to; None for all.
      dropout: Rate of dropout.

    Returns:
      [B, T, N, V].
    """
    k, v = visible.with_earlier(k, v, layer, window)
    causal, window = visible.mask is None, window if visible.mask is None else None
    mask, segments, _, _ = visible
    return attention(q, k, v, mask=mask, segments=segments, causal=causal, window=window, dropout=dropout, rng=rng)


def _mask_of(tokens: int, segments: tuple[jax.Array, jax.Array] | None, window: int | None) -> Any:
    """Return bool [1 or B, 1, T, T]."""
    numbers = np.arange(tokens, dtype=np.int32)
    mask = _causal_mask(numbers, numbers, window)
    return mask if segments is None else mask & segment_mask(*segments)


def _causal_mask(queries: Any, keys: Any, window: int | None) -> Any:
    """Return bool [1, 1, T, S] for the numbers of queries [T] and keys [S]."""
    distance = queries[:, None] - keys[None]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return mask[None, None]


def _or_ones(segments: jax.Array | None, rows: int, tokens: int) -> jax.Array:
    return jnp.ones((rows, tokens), np.int32) if segments is None else segments.astype(np.int32)


def _axis(x: jax.Array) -> int:
    """Return the axis of the slots in keys and values of a layer or of all, and in segments."""
    return max(x.ndim - 3, 1)


def _is_apart(tokens: int, window: int | None) -> bool:
    """Return whether new tokens must not be in slots yet, where a later one would hide what an earlier one sees."""
    return window is not None and tokens > 1


def _with_new(old: jax.Array, new: jax.Array, length: Any, window: int | None) -> jax.Array:
    """Return the keys, values or segments of the slots and of the new tokens, which have slots or follow them."""
    if _is_apart(new.shape[_axis(new)], window):
        return jnp.concatenate([old, new.astype(old.dtype)], axis=_axis(old))
    return _written(old, new, length)


def _written(old: jax.Array, new: jax.Array, length: Any) -> jax.Array:
    """Return the slots with the tokens that follow `length` earlier ones."""
    axis, new = _axis(old), new.astype(old.dtype)
    slots, tokens = old.shape[axis], new.shape[axis]
    if slots == 0:
        return new
    if tokens == 1:
        return lax.dynamic_update_slice_in_dim(old, new, length % np.int32(slots), axis)
    numbers = slot_tokens(length + np.int32(tokens), slots) - length
    taken = jnp.take(new, numbers, axis=axis, mode="clip")
    is_new = (numbers >= 0).reshape([-1 if i == axis else 1 for i in range(old.ndim)])
    return jnp.where(is_new, taken, old)
