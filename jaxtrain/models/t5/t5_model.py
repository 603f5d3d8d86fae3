"""T5 (Raffel et al. 2020), as `transformers.T5ForConditionalGeneration` computes it.

T5 v1.1 and FLAN-T5 are its variants with a gated GELU and an untied output layer. Encoder and decoder each scan over
stacked blocks. Positions enter as a learned bias of the attention scores, one per head and bucket of distances, shared
by the layers of a stack; scores are not scaled. Each block is a unit of rematerialization; "attention" and "hidden"
name the inputs of the projections into the residual stream.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.models.attention import attention
from jaxtrain.models.layers.decoder import KVCache, Visible, token_positions, visible_keys
from jaxtrain.models.layers.dropout import dropout as _dropout
from jaxtrain.models.layers.linear import Linear, product
from jaxtrain.models.t5.relative_position import relative_position_bucket
from jaxtrain.models.t5.t5_config import T5Config, is_gated
from jaxtrain.passes import block


class KeyValues(NamedTuple):
    """Keys and values [B, S, N, H] of one layer, or of all layers stacked along a leading axis [L]."""

    k: jax.Array
    v: jax.Array


class Source(NamedTuple):
    """What a decoder's cross-attention attends to: the encoder's output, or keys and values computed from it."""

    encoded: jax.Array | None
    """Output of the encoder [B, S, d_model]; None with `key_values`."""
    key_values: KeyValues | None
    """Keys and values of this layer, or of all layers; None with `encoded`."""
    mask: jax.Array | None
    """bool [B, 1, 1, S], True at tokens; None for no padding."""


class DecoderCache(NamedTuple):
    """Cache of a decoder: its own tokens, and the keys and values of the source in all layers."""

    tokens: KVCache
    source: Source


class T5(nnx.Module):
    """T5 with a language-modeling head.

    Called as `model(tokens, decoder_tokens, mask, decoder_mask, rng)`:

    Args:
      tokens: Source, int [B, S].
      decoder_tokens: Inputs of the decoder, int [B, T]: `shift_right` of the labels.
      mask: bool [B, S], False at padding; None for no padding.
      decoder_mask: bool [B, T], False at padding; None for no padding.
      rng: Dropout key for training mode, or None.

    Returns:
      Logits [B, T, vocab_size].
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(config.initializer_factor)
        self.shared = nnx.Param(normal(rngs.params(), (config.vocab_size, config.d_model)))
        self.encoder = Stack(config, config.num_layers, decoder=False, rngs=rngs)
        self.decoder = Stack(config, config.num_decoder_layers, decoder=True, rngs=rngs)
        std = config.initializer_factor
        self.lm_head = None if config.tie_word_embeddings else _linear(config.d_model, config.vocab_size, std, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        decoder_tokens: jax.Array,
        mask: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        encoder_rng, decoder_rng = (None, None) if rng is None else jax.random.split(rng)
        encoded = self.encode(tokens, mask, encoder_rng)
        return self.decode(decoder_tokens, encoded, mask, decoder_mask, decoder_rng)

    def encode(self, tokens: jax.Array, mask: jax.Array | None = None, rng: jax.Array | None = None) -> jax.Array:
        """Return the encoder's output [B, S, d_model] for tokens int [B, S] with a mask bool [B, S]."""
        x, _ = self.encoder(self.shared[...][tokens], _key_mask(mask), None, rng)
        return x

    def decode(
        self,
        decoder_tokens: jax.Array,
        encoded: jax.Array,
        mask: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits [B, T, vocab_size] for decoder inputs int [B, T] and the encoder's output with its mask."""
        source = Source(encoded, None, _key_mask(mask))
        x, _ = self.decoder(self.shared[...][decoder_tokens], _key_mask(decoder_mask), source, rng)
        return self._logits(x)

    def init_cache(self, encoded: jax.Array, mask: jax.Array | None, slots: int) -> DecoderCache:
        """Return a cache for `slots` decoder tokens after a source, in the dtype of the parameters.

        Args:
          encoded: Output of the encoder [B, S, d_model].
          mask: bool [B, S], False at padding; None for no padding.
          slots: Largest number of decoder tokens.
        """
        graphdef, layers = nnx.split(self.decoder.blocks)

        def key_values(layer: Any) -> KeyValues:
            attention = nnx.merge(graphdef, layer).cross_attention
            assert attention is not None
            return attention.key_values(encoded)

        source = Source(None, lax.map(key_values, layers), _key_mask(mask))
        return DecoderCache(self.empty_cache(len(encoded), slots), source)

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """Return a cache for `slots` decoder tokens in each of `rows` rows, in the dtype of the parameters."""
        config = self.config
        shape = (rows, slots, config.num_heads, config.d_kv)
        return KVCache.empty([None] * config.num_decoder_layers, shape, self.shared[...].dtype)

    def decode_cached(self, decoder_tokens: jax.Array, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        """Return logits [B, T, vocab_size] for the next decoder inputs int [B, T], and the cache with them appended."""
        x, keys = self.decoder(self.shared[...][decoder_tokens], None, cache.source, None, cache.tokens)
        no_layer = np.zeros(self.config.num_decoder_layers, bool)
        return self._logits(x), cache._replace(tokens=cache.tokens.append(keys, None, no_layer))

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.lm_head is not None:
            return self.lm_head(x)
        return product(x * self.config.d_model**-0.5, self.shared[...].T)


def _key_mask(mask: jax.Array | None) -> jax.Array | None:
    """Return a mask of keys [B, S] as [B, 1, 1, S], for scores [B, N, T, S]."""
    return None if mask is None else mask[:, None, None, :]


class Stack(nnx.Module):
    """Blocks of the encoder or of the decoder and the final norm, on [B, T, d_model]."""

    def __init__(self, config: T5Config, layers: int, *, decoder: bool, rngs: nnx.Rngs) -> None:
        self.config, self.layers, self.decoder = config, layers, decoder
        normal = nnx.initializers.normal(config.initializer_factor * config.d_model**-0.5)
        biases = (config.relative_attention_num_buckets, config.num_heads)
        self.relative_attention_bias = nnx.Param(normal(rngs.params(), biases))
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(lambda key: Block(config, decoder=decoder, rngs=nnx.Rngs(key)))(keys)
        self.final_layer_norm = RMSNorm(config)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | np.ndarray | None,
        source: Source | None,
        rng: jax.Array | None,
        cache: KVCache | None = None,
    ) -> tuple[jax.Array, Any]:
        """Return the output, and with a cache the stacked keys and values of the layers to append to it.

        Args:
          x: [B, T, d_model].
          mask: bool, broadcastable to [B, N, T, S], True where a query attends to a key; None for everywhere. A
            decoder's query also attends to no later key.
          source: What the cross-attention attends to, for all layers; None in the encoder.
          rng: Dropout key, or None.
          cache: Cache of a decoder's tokens before these, or None.
        """
        first, blocks_rng, last = [None] * 3 if rng is None else jax.random.split(rng, 3)
        graphdef, layers = nnx.split(self.blocks)
        apply = block(lambda layer, *args: nnx.merge(graphdef, layer)(*args))
        visible = visible_keys(x.shape[1], None, None, cache)
        if visible.slots is None:
            bias = self.position_bias(np.arange(x.shape[1], dtype=np.int32), x.shape[1])
        else:
            positions, mask = token_positions(None, x.shape[1], cache)[0], visible.mask
            bias = self.position_bias(positions, visible.slots.k.shape[2])

        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            params, rng, key_values, number = layer
            layer_source = None if source is None else source._replace(key_values=key_values)
            return apply(params, x, bias, mask, layer_source, rng, visible, number)

        rngs = None if blocks_rng is None else jax.random.split(blocks_rng, self.layers)
        key_values = None if source is None else source.key_values
        numbers = None if cache is None else np.arange(self.layers, dtype=np.int32)
        x, keys = lax.scan(step, _dropout(x, self.config.dropout, first), (layers, rngs, key_values, numbers))
        return _dropout(self.final_layer_norm(x), self.config.dropout, last), keys

    def position_bias(self, queries: jax.Array | np.ndarray, keys: int) -> jax.Array:
        """Return the bias [1, N, T, S] for queries at positions int [T] and keys at positions 0 … S − 1."""
        # For every possible distance, because with a cache the positions are known only at run time.
        distances = np.arange(1 - keys, keys)
        buckets = relative_position_bucket(
            distances,
            bidirectional=not self.decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        # Computed by the program, in which an array [T, S] is no constant and each device computes its own rows.
        distance = jnp.arange(keys, dtype=np.int32)[None, :] - jnp.asarray(queries)[:, None]
        return self.relative_attention_bias[...][jnp.asarray(buckets)[distance + keys - 1]].transpose(2, 0, 1)[None]


class Block(nnx.Module):
    """Pre-norm block on [B, T, d_model]: self-attention, in the decoder cross-attention, and an MLP.

    With a cache it also returns the keys and values to append to it.
    """

    def __init__(self, config: T5Config, *, decoder: bool, rngs: nnx.Rngs) -> None:
        self.config, self.decoder = config, decoder
        self.self_norm = RMSNorm(config)
        self.self_attention = Attention(config, rngs=rngs)
        self.cross_norm = RMSNorm(config) if decoder else None
        self.cross_attention = Attention(config, rngs=rngs) if decoder else None
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        mask: jax.Array | None,
        source: Source | None,
        rng: jax.Array | None,
        visible: Visible,
        layer: jax.Array | None,
    ) -> tuple[jax.Array, KeyValues | None]:
        rate = self.config.dropout
        rngs = [None] * 6 if rng is None else jax.random.split(rng, 6)
        y = self.self_norm(x)
        causal = self.decoder and visible.slots is None  # the mask of a cache is causal itself
        new = self.self_attention.key_values(y)
        seen = KeyValues(*visible.with_earlier(*new, layer, None))
        attended = self.self_attention(y, seen, bias, mask, rngs[0], causal=causal)
        x = x + _dropout(attended, rate, rngs[1])
        if self.cross_norm is not None and self.cross_attention is not None:
            assert source is not None
            key_values = source.key_values
            if source.encoded is not None:
                key_values = self.cross_attention.key_values(source.encoded)
            assert key_values is not None
            attended = self.cross_attention(self.cross_norm(x), key_values, None, source.mask, rngs[2])
            x = x + _dropout(attended, rate, rngs[3])
        return x + _dropout(self.mlp(self.mlp_norm(x), rngs[4]), rate, rngs[5]), None if layer is None else new


class Attention(nnx.Module):
    """Multi-head attention of queries [B, T, d_model], without a scale and with bias-free projections."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, inner, factor = config.d_model, config.num_heads * config.d_kv, config.initializer_factor
        # The initial weights of the queries include the missing scale of the scores.
        self.q = _linear(width, inner, factor * (width * config.d_kv) ** -0.5, rngs)
        self.k = _linear(width, inner, factor * width**-0.5, rngs)
        self.v = _linear(width, inner, factor * width**-0.5, rngs)
        self.o = _linear(inner, width, factor * inner**-0.5, rngs)

    def key_values(self, y: jax.Array) -> KeyValues:
        """Return keys and values [B, S, N, H] of [B, S, d_model]."""
        return KeyValues(self._heads(self.k(y)), self._heads(self.v(y)))

    def __call__(
        self,
        x: jax.Array,
        key_values: KeyValues,
        bias: jax.Array | None,
        mask: jax.Array | None,
        rng: jax.Array | None,
        *,
        causal: bool = False,
    ) -> jax.Array:
        q, (k, v) = self._heads(self.q(x)), key_values
        rate = self.config.dropout
        attended = attention(q, k, v, mask=mask, bias=bias, causal=causal, scale=1.0, dropout=rate, rng=rng)
        attended = attended.reshape(*x.shape[:2], -1)
        return self.o(checkpoint_name(attended, "attention"))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.config.num_heads, self.config.d_kv)


class MLP(nnx.Module):
    """MLP on [B, T, d_model]: two layers with a ReLU, or three with a gated GELU."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, hidden, factor = config.d_model, config.d_ff, config.initializer_factor
        self.wi = _linear(width, hidden, factor * width**-0.5, rngs)
        self.linear = _linear(width, hidden, factor * width**-0.5, rngs) if is_gated(config.feed_forward_proj) else None
        self.wo = _linear(hidden, width, factor * hidden**-0.5, rngs)

    def __call__(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        if self.linear is None:
            hidden = jax.nn.relu(self.wi(x))
        else:
            hidden = jax.nn.gelu(self.wi(x), approximate=True) * self.linear(x)
        return self.wo(checkpoint_name(_dropout(hidden, self.config.dropout, rng), "hidden"))


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis: x / √(mean x² + ε) · scale (Zhang and Sennrich 2019)."""

    def __init__(self, config: T5Config) -> None:
        self.epsilon = config.layer_norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.d_model))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        mean_square = jnp.square(wide).mean(-1, keepdims=True)
        normalized = (wide * lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype)
        return self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,)) * normalized


def _linear(n: int, m: int, std: float, rngs: nnx.Rngs) -> Linear:
    return Linear(n, m, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)
