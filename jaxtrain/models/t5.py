"""T5 (Raffel et al. 2020), as `transformers.T5ForConditionalGeneration` computes it; v1.1 and FLAN-T5 are its
variants with a gated GELU and an output layer of its own.

An encoder and a decoder, each a scan over stacked blocks. Positions enter as a learned bias of the attention scores,
one for each head and bucket of distances, shared by a stack's layers; scores are not scaled. Each block is a unit of
rematerialisation, in which "attention" and "hidden" (what enters the projections into the residual stream) have names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models.decoder import Kept, KVCache, expecting, places, remembered, visible
from jaxtrain.models.dropout import dropout as _dropout
from jaxtrain.models.hf_config import require
from jaxtrain.models.linear import Linear, product
from jaxtrain.transforms import block

IGNORED = -100
"""The label of a place that has none, as in `torch.nn.functional.cross_entropy`."""

FEED_FORWARD = ("relu", "gated-gelu")


@dataclass(frozen=True)
class T5Config:
    """Sizes, dropout rate and conventions; the names are those of `transformers.T5Config`.

    Without `tie_word_embeddings` the output layer has weights of its own and its input is not scaled (v1.1, FLAN).
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    pad_token_id: int = 0
    eos_token_id: int = 1
    decoder_start_token_id: int = 0

    def __post_init__(self) -> None:
        if self.feed_forward_proj not in FEED_FORWARD:
            raise UserError(f"feed_forward_proj {self.feed_forward_proj!r}: T5 here has {' and '.join(FEED_FORWARD)}")


class Memory(NamedTuple):
    """What the decoder goes on from: the tokens it has read, and the source, which every token attends to.

    `source` are the keys and values of all layers, [L, B, S, N, H] each; `mask` bool [B, S], True at tokens.
    """

    cache: KVCache
    source: Kept
    mask: jax.Array | None


class T5(nnx.Module):
    """Tokens int [B, S] and the decoder's int [B, T] (`shift_right` of the labels) → logits [B, T, vocab_size].

    The masks, bool [B, S] and [B, T], are True at tokens and False at padding. With a dropout key it is in training
    mode.
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
        """Tokens int [B, S] → [B, S, d_model], what the decoder attends to."""
        x, _ = self.encoder(self.shared[...][tokens], _keys(mask), None, None, rng)
        return x

    def decode(
        self,
        decoder_tokens: jax.Array,
        encoded: jax.Array,
        mask: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's tokens int [B, T], and what the encoder made of its own, masked by `mask` → logits."""
        t = decoder_tokens.shape[1]
        causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
        seen = causal if decoder_mask is None else causal & decoder_mask[:, None, None, :]
        x, _ = self.decoder(self.shared[...][decoder_tokens], seen, encoded, _keys(mask), rng)
        return self._logits(x)

    def remember(self, encoded: jax.Array, mask: jax.Array | None, slots: int) -> Memory:
        """Of what was encoded, [B, S, d_model], and no token yet: room for so many, in the dtype of the parameters."""
        config, dtype = self.config, self.shared[...].dtype
        graphdef, layers = nnx.split(self.decoder.blocks)

        def keys_values(layer: Any) -> Kept:
            attention = nnx.merge(graphdef, layer).cross_attention
            assert attention is not None
            return attention.keys_values(encoded)

        source = lax.map(keys_values, layers)
        cache = KVCache.empty(config.num_decoder_layers, len(encoded), slots, config.num_heads, config.d_kv, dtype)
        return Memory(cache, source, mask)

    def go_on(self, decoder_tokens: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """The next tokens of the decoder, int [B, T] → (logits [B, T, vocab_size], the memory with these tokens)."""
        cache, segments = expecting(memory.cache, None, decoder_tokens)
        assert cache is not None
        t = decoder_tokens.shape[1]
        seen = visible(t, segments, None, cache)
        memory = memory._replace(cache=cache)
        x, kept = self.decoder(self.shared[...][decoder_tokens], seen, None, _keys(memory.mask), None, memory)
        return self._logits(x), memory._replace(cache=cache.holding(kept, t))

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.lm_head is not None:
            return self.lm_head(x)
        return product(x * self.config.d_model**-0.5, self.shared[...].T)


def _keys(mask: jax.Array | None) -> jax.Array | None:
    """A mask of keys [B, S] as one of scores [B, heads, T, S]."""
    return None if mask is None else mask[:, None, None, :]


class Stack(nnx.Module):
    """The blocks of the encoder or of the decoder, and the last norm: [B, T, d_model] → the same, and what is kept."""

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
        seen: jax.Array | np.ndarray | None,
        encoded: jax.Array | None,
        encoded_seen: jax.Array | None,
        rng: jax.Array | None,
        memory: Memory | None = None,
    ) -> tuple[jax.Array, Any]:
        """`seen` and `encoded_seen`, bool and broadcast to [B, heads, T, S], say which keys a query sees.

        With a memory, which already expects the tokens, the source in it is attended to, and the keys and values of
        all layers are kept.
        """
        first, blocks_rng, last = [None] * 3 if rng is None else jax.random.split(rng, 3)
        graphdef, layers = nnx.split(self.blocks)
        apply = block(lambda layer, *args: nnx.merge(graphdef, layer)(*args))
        cache, source = (None, None) if memory is None else (memory.cache, memory.source)
        at, kept, slots = (None, None, x.shape[1]) if cache is None else (cache.length, cache[:2], cache.k.shape[2])
        bias = self.position_bias(places(None, x.shape[1], cache)[0], slots)

        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            params, *own = layer
            return apply(params, x, bias, seen, encoded, encoded_seen, at, *own)

        layer_rngs = None if blocks_rng is None else jax.random.split(blocks_rng, self.layers)
        x, kept = lax.scan(step, _dropout(x, self.config.dropout, first), (layers, layer_rngs, source, kept))
        return _dropout(self.final_layer_norm(x), self.config.dropout, last), kept

    def position_bias(self, queries: jax.Array | np.ndarray, keys: int) -> jax.Array:
        """[1, heads, T, S], of queries at the places int [T] by keys at 0 … S − 1."""
        # Of every distance there can be: places are known only as the program runs where there is a cache.
        distances = np.arange(1 - keys, keys)
        buckets = relative_position_bucket(
            distances,
            bidirectional=not self.decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        distance = np.arange(keys, dtype=np.int32)[None, :] - queries[:, None]
        return self.relative_attention_bias[...][jnp.asarray(buckets)[distance + keys - 1]].transpose(2, 0, 1)[None]


class Block(nnx.Module):
    """Self-attention, in the decoder attention to the source, and an MLP, each added to x: [B, T, d_model] → the same,
    and the keys and values kept.

    Of the source there is either `encoded`, [B, S, d_model], or this layer's keys and values.
    """

    def __init__(self, config: T5Config, *, decoder: bool, rngs: nnx.Rngs) -> None:
        self.config = config
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
        seen: jax.Array | None,
        encoded: jax.Array | None,
        encoded_seen: jax.Array | None,
        at: jax.Array | None,
        rng: jax.Array | None,
        source: Kept | None,
        kept: Kept | None,
    ) -> tuple[jax.Array, Kept | None]:
        rate = self.config.dropout
        rngs = [None] * 6 if rng is None else jax.random.split(rng, 6)
        y = self.self_norm(x)
        k, v, kept = remembered(*self.self_attention.keys_values(y), kept, at)
        x = x + _dropout(self.self_attention(y, k, v, bias, seen, rngs[0]), rate, rngs[1])
        if self.cross_norm is not None and self.cross_attention is not None:
            source = source if encoded is None else self.cross_attention.keys_values(encoded)
            assert source is not None
            attended = self.cross_attention(self.cross_norm(x), *source, None, encoded_seen, rngs[2])
            x = x + _dropout(attended, rate, rngs[3])
        return x + _dropout(self.mlp(self.mlp_norm(x), rngs[4]), rate, rngs[5]), kept


class Attention(nnx.Module):
    """Multi-head attention without scale or biases of its layers: [B, T, d_model] → the same, given keys and values
    [B, S, N, H]."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, inner, factor = config.d_model, config.num_heads * config.d_kv, config.initializer_factor
        # The missing scale of the scores is in the queries' weights.
        self.q = _linear(width, inner, factor * (width * config.d_kv) ** -0.5, rngs)
        self.k = _linear(width, inner, factor * width**-0.5, rngs)
        self.v = _linear(width, inner, factor * width**-0.5, rngs)
        self.o = _linear(inner, width, factor * inner**-0.5, rngs)

    def keys_values(self, y: jax.Array) -> Kept:
        """Of [B, S, d_model]: [B, S, N, H] each."""
        return self._heads(self.k(y)), self._heads(self.v(y))

    def __call__(
        self,
        x: jax.Array,
        k: jax.Array,
        v: jax.Array,
        bias: jax.Array | None,
        seen: jax.Array | None,
        rng: jax.Array | None,
    ) -> jax.Array:
        q = self._heads(self.q(x))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if bias is not None:
            scores = scores + bias
        if seen is not None:
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        weights = _dropout(jax.nn.softmax(scores, axis=-1), self.config.dropout, rng)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1)
        return self.o(checkpoint_name(attended, "attention"))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.config.num_heads, self.config.d_kv)


class MLP(nnx.Module):
    """Two layers with a ReLU between, or three with one gating another: [B, T, d_model] → the same."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, hidden, factor = config.d_model, config.d_ff, config.initializer_factor
        self.wi = _linear(width, hidden, factor * width**-0.5, rngs)
        self.linear = _linear(width, hidden, factor * width**-0.5, rngs) if _gated(config.feed_forward_proj) else None
        self.wo = _linear(hidden, width, factor * hidden**-0.5, rngs)

    def __call__(self, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        if self.linear is None:
            hidden = jax.nn.relu(self.wi(x))
        else:
            hidden = jax.nn.gelu(self.wi(x), approximate=True) * self.linear(x)
        return self.wo(checkpoint_name(_dropout(hidden, self.config.dropout, rng), "hidden"))


class RMSNorm(nnx.Module):
    """x divided by its root mean square over [..., d_model], times a scale (Zhang and Sennrich 2019)."""

    def __init__(self, config: T5Config) -> None:
        self.epsilon = config.layer_norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.d_model))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.square(x).mean(-1, keepdims=True)
        normed = x * lax.rsqrt(mean_square + self.epsilon)
        return self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,)) * normed


def shift_right(labels: jax.Array, config: T5Config) -> jax.Array:
    """The decoder's tokens that predict `labels`, int [B, T]: each place is given the label before it.

    Places without a label (−100) become padding.

    >>> shift_right(jnp.array([[5, 6, 1, -100, -100]]), T5Config()).tolist()
    [[0, 5, 6, 1, 0]]
    """
    start = jnp.full_like(labels[:, :1], config.decoder_start_token_id)
    shifted = jnp.concatenate([start, labels[:, :-1]], axis=1)
    return jnp.where(shifted == IGNORED, config.pad_token_id, shifted)


def relative_position_bucket(
    distance: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """The bucket, int of the shape of `distance` (key's place − query's), that a distance falls into.

    Half of the buckets are for one distance each, the others wider by powers, up to `max_distance` and beyond. Where
    only the past is seen, all of the future is in bucket 0. The formula is Mesh TensorFlow's
    (`_relative_position_bucket`), float32 as there.

    >>> relative_position_bucket(np.array([-200, -9, -1, 0, 1]), bidirectional=False, num_buckets=32, max_distance=128)
    array([31,  9,  1,  0,  0])
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset, distance = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    powers = np.log(np.maximum(distance, exact).astype(np.float32) / exact) / math.log(max_distance / exact)
    wide = np.minimum(exact + (powers * (num_buckets - exact)).astype(distance.dtype), num_buckets - 1)
    return offset + np.where(distance < exact, distance, wide)


def _gated(feed_forward_proj: str) -> bool:
    return feed_forward_proj.startswith("gated-")


def _linear(n: int, m: int, std: float, rngs: nnx.Rngs) -> Linear:
    return Linear(n, m, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)


SHARDING = {
    "shared": P("tensor", "fsdp"),
    "lm_head/kernel": P("fsdp", "tensor"),
    ".*/relative_attention_bias": P("fsdp", "tensor"),
    ".*/blocks/.*_attention/[qkv]/kernel": P(None, "fsdp", "tensor"),
    ".*/blocks/.*_attention/o/kernel": P(None, "tensor", "fsdp"),
    ".*/blocks/mlp/(wi|linear)/kernel": P(None, "fsdp", "tensor"),
    ".*/blocks/mlp/wo/kernel": P(None, "tensor", "fsdp"),
    ".*/blocks/.*/scale": P(None, "fsdp"),
    ".*/final_layer_norm/scale": P("fsdp"),
}
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`), as those of GPT-2."""


def torch_names(config: T5Config) -> NameTable:
    """The names in `transformers.T5ForConditionalGeneration`."""
    table = {"shared": TorchParam("shared.weight")}
    for stack in ("encoder", "decoder"):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table[f"{stack}/relative_attention_bias"] = TorchParam(first)
        table[f"{stack}/final_layer_norm/scale"] = TorchParam(f"{stack}.final_layer_norm.weight")
        attentions = {"self": "SelfAttention"} | ({"cross": "EncDecAttention"} if stack == "decoder" else {})
        layer = f"{stack}.block.{{layer}}.layer"
        for i, (ours, theirs) in enumerate(attentions.items()):
            table[f"{stack}/blocks/{ours}_norm/scale"] = TorchParam(f"{layer}.{i}.layer_norm.weight")
            for name in "qkvo":
                kernel = TorchParam(f"{layer}.{i}.{theirs}.{name}.weight", LINEAR)
                table[f"{stack}/blocks/{ours}_attention/{name}/kernel"] = kernel
        i = len(attentions)
        table[f"{stack}/blocks/mlp_norm/scale"] = TorchParam(f"{layer}.{i}.layer_norm.weight")
        mlp = (
            {"wi": "wi_0", "linear": "wi_1", "wo": "wo"}
            if _gated(config.feed_forward_proj)
            else {"wi": "wi", "wo": "wo"}
        )
        for ours, theirs in mlp.items():
            kernel = TorchParam(f"{layer}.{i}.DenseReluDense.{theirs}.weight", LINEAR)
            table[f"{stack}/blocks/mlp/{ours}/kernel"] = kernel
    tied = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    if config.tie_word_embeddings:
        tied["lm_head.weight"] = "shared.weight"
    else:
        table["lm_head/kernel"] = TorchParam("lm_head.weight", LINEAR)
    return NameTable(table, tied=tied)


def from_hf(config: Mapping[str, Any]) -> T5Config:
    """The configuration that a Hugging Face `config.json` says.

    Raises `UserError` for what would change the numbers and is not supported.
    """
    same = {
        "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
        "relative_attention_max_distance", "layer_norm_epsilon", "initializer_factor", "feed_forward_proj",
    }  # fmt: skip
    given = {name: config[name] for name in same & config.keys()}
    gated = _gated(config.get("feed_forward_proj", "relu"))
    # In transformers these two have the last word.
    activation = "gelu_new" if gated else "relu"
    require(config, dense_act_fn=activation, is_gated_act=gated, quantization_config=None, is_causal=True)
    depth = config.get("num_decoder_layers")
    tokens = {name: config.get(name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    # transformers 5 writes true for the second whatever is so, and says by the first what it was.
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return T5Config(
        **given,
        **{name: token for name, token in tokens.items() if token is not None},
        num_decoder_layers=config.get("num_layers", T5Config.num_layers) if depth is None else depth,
        dropout=config.get("dropout_rate", 0.1),
        tie_word_embeddings=tied is not False,
    )


def to_hf(config: T5Config) -> dict[str, Any]:
    """The `config.json` of which `transformers` makes the same model."""
    fields = {name: getattr(config, name) for name in T5Config.__dataclass_fields__ if name != "dropout"}
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "dropout_rate": config.dropout,
        **fields,
    }
