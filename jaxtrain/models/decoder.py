"""Key-value cache and attention masks of decoders."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models.attention import is_long, segment_mask


class LayerCache(NamedTuple):
    """Key-value cache of one layer, or of all layers stacked along a leading axis [L]."""

    k: jax.Array
    """Keys [B, S, K, H]."""
    v: jax.Array
    """Values [B, S, K, H]."""
    length: jax.Array
    """Number of slots in use, int32 []."""


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, for every layer.

    The number of slots S is static. Tokens written past the last slot overwrite it, so the creator must make the cache
    large enough.
    """

    k: jax.Array
    """Keys [L, B, S, K, H]."""
    v: jax.Array
    """Values [L, B, S, K, H]."""
    segments: jax.Array
    """Segment of every slot, int32 [B, S]; 0 for padding and for unused slots."""
    length: jax.Array
    """Number of slots in use, int32 []."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int], dtype: Any) -> "KVCache":
        """Return a cache without tokens; `shape` is that of the keys, [L, B, S, K, H]."""
        zeros, (_, rows, slots, _, _) = jnp.zeros(shape, dtype), shape
        return cls(zeros, zeros, jnp.zeros((rows, slots), np.int32), jnp.zeros([], np.int32))

    def layers(self) -> LayerCache:
        """Return the stacked caches of the layers, as `lax.scan` takes them."""
        return LayerCache(self.k, self.v, jnp.broadcast_to(self.length, self.k.shape[:1]))

    def reserve(self, segments: jax.Array) -> "KVCache":
        """Write the segments [B, T] of the next T tokens, before their keys and values are known."""
        written = lax.dynamic_update_slice(self.segments, segments.astype(np.int32), (np.int32(0), self.length))
        return self._replace(segments=written)

    def append(self, layers: LayerCache) -> "KVCache":
        """Replace keys and values by those of `layers`, stacked, as `update_cache` returns them for every layer."""
        return self._replace(k=layers.k, v=layers.v, length=layers.length[0])


def reserve(
    cache: KVCache | None, segments: jax.Array | None, tokens: jax.Array
) -> tuple[KVCache | None, jax.Array | None]:
    """Return the cache with slots reserved for `tokens` [B, T], and their segments.

    With a cache the segments default to 1; without one both arguments are returned as they are.
    """
    if cache is None:
        return None, segments
    segments = jnp.ones_like(tokens) if segments is None else segments
    return cache.reserve(segments), segments


def token_positions(positions: jax.Array | None, tokens: int, cache: KVCache | None) -> jax.Array | np.ndarray:
    """Return positions int [1 or B, T]: those given, or the numbers that follow the cache, or from 0 on."""
    if positions is not None:
        return positions
    count = np.arange(tokens, dtype=np.int32)[None]
    return count if cache is None else cache.length + count


def update_cache(
    k: jax.Array, v: jax.Array, cache: LayerCache | None
) -> tuple[jax.Array, jax.Array, LayerCache | None]:
    """Return the keys and values to attend to, and the cache with the new ones, [B, T, K, H], appended."""
    if cache is None:
        return k, v, None
    start = (np.int32(0), cache.length, np.int32(0), np.int32(0))
    keys, values = (
        lax.dynamic_update_slice(old, new.astype(old.dtype), start) for old, new in ((cache.k, k), (cache.v, v))
    )
    return keys, values, LayerCache(keys, values, cache.length + np.int32(k.shape[1]))


class Visible(NamedTuple):
    """The keys that the queries of causal self-attention attend to.

    Attributes:
      mask: bool [1 or B, 1, T, S], causal itself; None for a causal mask.
      segments: Segments of queries and keys, int [B, T] each, beside a causal mask; None for one segment.
    """

    mask: Any = None
    segments: tuple[jax.Array, jax.Array] | None = None

    @property
    def is_causal(self) -> bool:
        """Whether attention has to be causal by itself."""
        return self.mask is None


def visible_keys(tokens: int, segments: jax.Array | None, window: int | None, cache: KVCache | None) -> Visible:
    """Return the keys of a decoder's self-attention: long sequences without an array [T, T].

    The arguments are those of `attention_mask`. Without a cache the `window` is not in what is returned if that is
    causal only by `is_causal`.
    """
    if cache is None and segments is not None and is_long(tokens, tokens):
        return Visible(None, (segments, segments))
    return Visible(attention_mask(tokens, segments, window, cache))


def attention_mask(
    tokens: int, segments: jax.Array | None, window: int | None, cache: KVCache | None
) -> jax.Array | np.ndarray | None:
    """Return the mask [1 or B, 1, T, S] of a decoder's self-attention; None for a plain causal mask.

    A token attends to itself and to the earlier tokens of its segment; with a `window`, only to the last `window` of
    them. With a cache, in which the tokens are already reserved, S is the number of its slots.
    """
    if cache is not None:
        assert segments is not None
        mask = sliding_window_mask(tokens, cache.segments.shape[1], cache.length, window)
        return mask & segment_mask(segments, cache.segments)
    if segments is None and (window is None or window >= tokens):
        return None
    mask = sliding_window_mask(tokens, tokens, np.int32(0), window)
    return mask if segments is None else mask & segment_mask(segments, segments)


def sliding_window_mask(t: int, s: int, start: Any, window: int | None) -> Any:
    """Return bool [1, 1, T, S]: key s is at most query `start` + t, and one of the last `window` if there is one."""
    distance = start + np.arange(t, dtype=np.int32)[:, None] - np.arange(s, dtype=np.int32)[None, :]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return mask[None, None]
