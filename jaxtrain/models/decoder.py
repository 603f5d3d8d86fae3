"""What decoders share: which tokens a token sees, and the keys and values kept of those before it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention import segment_mask

Kept = tuple[jax.Array, jax.Array]
"""Keys and values: [B, S, K, H] each of one layer, with a leading axis of all."""


class KVCache(NamedTuple):
    """Of every layer the keys and values of the tokens so far, in slots of which `length` (int32) are taken.

    `k` and `v` [L, B, S, K, H]; `segments` int32 [B, S], 0 for padding and for slots not taken. S is static: whoever
    makes it makes it long enough, for what is written past its end overwrites the last.
    """

    k: jax.Array
    v: jax.Array
    segments: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, layers: int, rows: int, slots: int, heads: int, head_dim: int, dtype: Any) -> "KVCache":
        """One without tokens."""
        kept = jnp.zeros((layers, rows, slots, heads, head_dim), dtype)
        return cls(kept, kept, jnp.zeros((rows, slots), np.int32), jnp.zeros([], np.int32))

    def expecting(self, segments: jax.Array) -> "KVCache":
        """With the segments of the tokens to come, [B, T], whose keys and values are to follow."""
        taken = lax.dynamic_update_slice(self.segments, segments.astype(np.int32), (np.int32(0), self.length))
        return self._replace(segments=taken)

    def holding(self, kept: Kept, tokens: int) -> "KVCache":
        """With these keys and values of all layers, `tokens` more than before."""
        k, v = kept
        return self._replace(k=k, v=v, length=self.length + np.int32(tokens))


def expecting(
    cache: KVCache | None, segments: jax.Array | None, tokens: jax.Array
) -> tuple[KVCache | None, jax.Array | None]:
    """The cache that expects `tokens` [B, T], and their segments: all 1 where there is a cache and none are given."""
    if cache is None:
        return None, segments
    segments = jnp.ones_like(tokens) if segments is None else segments
    return cache.expecting(segments), segments


def places(positions: jax.Array | None, tokens: int, cache: KVCache | None) -> jax.Array | np.ndarray:
    """The positions [1 or B, T]; where none are given, from where the cache ends, or 0, on."""
    if positions is not None:
        return positions
    count = np.arange(tokens, dtype=np.int32)[None]
    return count if cache is None else cache.length + count


def remembered(
    k: jax.Array, v: jax.Array, kept: Kept | None, at: jax.Array | None
) -> tuple[jax.Array, jax.Array, Kept | None]:
    """The keys and values to attend to, and to keep: new ones [B, T, K, H] behind the `at` kept ones, if any are."""
    if kept is None or at is None:
        return k, v, None
    start = (np.int32(0), at, np.int32(0), np.int32(0))
    k, v = (lax.dynamic_update_slice(old, new.astype(old.dtype), start) for old, new in zip(kept, (k, v), strict=True))
    return k, v, (k, v)


def visible(
    tokens: int, segments: jax.Array | None, window: int | None, cache: KVCache | None
) -> jax.Array | np.ndarray | None:
    """The mask [1 or B, 1, T, S] of a decoder's attention; None where it is all that comes before.

    A token sees itself and those before it of its segment, with a `window` the last so many. With a cache, which
    already expects the tokens, S are its slots.
    """
    if cache is not None:
        assert segments is not None
        mask = behind(tokens, cache.segments.shape[1], cache.length, window)
        return mask & segment_mask(segments, cache.segments)
    if segments is None and (window is None or window >= tokens):
        return None
    mask = behind(tokens, tokens, np.int32(0), window)
    return mask if segments is None else mask & segment_mask(segments, segments)


def behind(t: int, s: int, start: Any, window: int | None) -> Any:
    """[1, 1, T, S]: whether key s is no later than query `start` + t, and with a `window` one of the last so many."""
    distance = start + np.arange(t, dtype=np.int32)[:, None] - np.arange(s, dtype=np.int32)[None, :]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return mask[None, None]
