"""The Llama family, as `transformers` computes it: Llama 2 and 3 (including SmolLM), Mistral, Qwen2, Qwen3, SmolLM3.

Blocks have RMSNorm before each half, rotary positions, grouped queries and SwiGLU. They are stacked and scanned as
those of GPT-2 (`jaxtrain.models.gpt2`), with the same names for rematerialization.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.errors import UserError
from jaxtrain.models.attention import is_long
from jaxtrain.models.layers.decoder import KVCache, Visible, attend, token_positions, visible_keys
from jaxtrain.models.layers.linear import Linear, product
from jaxtrain.models.layers.rope import apply_rotary, rotary_cos_sin
from jaxtrain.models.llama.llama_config import LlamaConfig
from jaxtrain.passes import block, kernel, recomputed


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis: x / √(mean x² + ε) · scale (Zhang and Sennrich 2019).

    As in `transformers`, the quotient is computed in float32 at least and rounded to the dtype of `x` before scaling.
    """

    def __init__(self, features: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        normalized: jax.Array = recomputed(partial(_rms_norm, epsilon=self.epsilon))(x, scale)
        return normalized


def _rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    normalized: jax.Array = kernel(partial(_over_root_mean_square, epsilon=epsilon))(x)
    return normalized * scale


def _over_root_mean_square(x: jax.Array, *, epsilon: float) -> jax.Array:
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped queries, on [B, T, hidden_size]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, head_dim, linear = config.hidden_size, config.head_dim, partial(_linear, config, rngs=rngs)
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.q_proj = linear(width, queries, bias=config.qkv_bias)
        self.k_proj = linear(width, keys, bias=config.qkv_bias)
        self.v_proj = linear(width, keys, bias=config.qkv_bias)
        self.o_proj = linear(queries, width, bias=config.attention_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        visible: "VisibleByKind",
        kind: "LayerKind",
        rng: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return the output, and with a cache the keys and values to append to it."""
        b, t, _ = x.shape
        q, k, v = (proj(x).reshape(b, t, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
        attended = self._attend(visible, kind, q, k, v, rng).reshape(b, t, -1)
        return self.o_proj(checkpoint_name(attended, "attention")), None if kind.number is None else (k, v)

    def _attend(
        self, visible: "VisibleByKind", kind: "LayerKind", q: jax.Array, k: jax.Array, v: jax.Array, rng: Any
    ) -> jax.Array:
        """Return the attention of a layer of this kind.

        Where layers differ, the masks of short sequences are selected from. Long ones and those with a cache take a
        `lax.cond` between two attentions with a static window, which have kernels and skip blocks outside of the
        window. It is exact for any order of the layers, one layer is compiled whatever the depth, and only the branch
        taken is computed; its condition is constant where the layers are unrolled. The branches have residuals of the
        same shapes, which `lax.cond` shares.
        """
        if visible.full is None or visible.sliding is None:
            (own,) = (keys for keys in visible if keys is not None)
            window = self.config.sliding_window if visible.full is None else None
            return self._attend_to(own, window, q, k, v, kind.number, rng)
        if visible.full.mask is not None and visible.full.slots is None:
            mask = jnp.where(kind.is_sliding, visible.sliding.mask, visible.full.mask)
            return self._attend_to(Visible(mask), None, q, k, v, None, rng)
        sliding = partial(self._attend_to, visible.sliding, self.config.sliding_window)
        full = partial(self._attend_to, visible.full, None)
        attended: jax.Array = lax.cond(kind.is_sliding, sliding, full, q, k, v, kind.number, rng)
        return attended

    def _attend_to(self, visible: Visible, window: int | None, *args: Any) -> jax.Array:
        q, k, v, number, rng = args
        return attend(q, k, v, visible, number, rng, window=window, dropout=self.config.attention_dropout)


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020), down(silu(gate(x)) · up(x)), on [B, T, hidden_size]; it has no auxiliary output."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        width, hidden, linear = config.hidden_size, config.intermediate_size, partial(_linear, config, rngs=rngs)
        self.gate_proj = linear(width, hidden, bias=config.mlp_bias)
        self.up_proj = linear(width, hidden, bias=config.mlp_bias)
        self.down_proj = linear(hidden, width, bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(gated_silu(self.gate_proj(x), self.up_proj(x)), "hidden")
        return self.down_proj(hidden), None


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), on [B, T, hidden_size].

    It also returns the auxiliary output of the MLP, and with a cache the keys and values to append to it.
    """

    def __init__(self, config: LlamaConfig, mlp: Callable[..., Any], *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, *context: Any) -> tuple[jax.Array, Any, Any]:
        attended, keys = self.self_attn(self.input_layernorm(x), *context)
        x = x + attended
        y, aux = self.mlp(self.post_attention_layernorm(x))
        return x + y, aux, keys


class Llama(nnx.Module):
    """Decoder of the Llama family with a language-modeling head.

    Called as `model(tokens, rng, positions, segments, cache)`:

    Args:
      tokens: int [B, T].
      rng: Dropout key for training mode, or None.
      positions: int [B, T]; None counts from 0, or from the length of the cache.
      segments: int [B, T]; tokens attend to their own segment only, so that several sequences can be packed into a row,
        each with its own positions. Padding is a segment too, by convention 0. None for one segment.
      cache: Cache of the tokens before these, from `empty_cache`; None for none.

    Returns:
      Logits [B, T, vocab_size]; with a cache, a tuple (logits, the cache with these tokens appended).

    Raises:
      UserError: On creation, if the query heads are not divisible by the key and value heads.
    """

    feed_forward: ClassVar[Callable[..., Any]] = MLP

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        if heads % shared:
            raise UserError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {shared}: change one")
        self.config = config
        normal = nnx.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(normal(rngs.params(), shape))
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        self.layers = nnx.vmap(lambda key: Block(config, self.feed_forward, rngs=nnx.Rngs(key)))(keys)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(normal(rngs.params(), shape[::-1]))

    def __call__(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        x, aux, cache = self.features(tokens, rng, positions, segments, cache)
        return self.output(self.logits(x), aux) if cache is None else (self.logits(x), cache)

    def features(
        self,
        tokens: jax.Array,
        rng: jax.Array | None,
        positions: jax.Array | None,
        segments: jax.Array | None,
        cache: KVCache | None,
    ) -> tuple[jax.Array, Any, KVCache | None]:
        """Return what `logits` are computed from, the stacked auxiliary outputs of the layers, and the updated cache.

        The arguments are those of a call.
        """
        config, t = self.config, tokens.shape[1]
        visible = _visible(config, t, segments, cache)
        x = self._embed(tokens)
        cos_sin = rotary_cos_sin(config.rope_parameters, token_positions(positions, t, cache), config.head_dim, x.dtype)
        graphdef, layers = nnx.split(self.layers)

        @block
        def apply(layer: Any, kind: LayerKind, x: jax.Array, cos_sin: Any, visible: Any, rng: Any) -> Any:
            return nnx.merge(graphdef, layer)(x, _select_cos_sin(cos_sin, kind), visible, kind, rng)

        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            x, *others = apply(*layer[:2], x, cos_sin, visible, layer[2])
            return x, others

        rngs = None if rng is None else jax.random.split(rng, config.num_hidden_layers)
        x, (aux, keys) = lax.scan(step, x, (layers, _layer_kinds(config, cache), rngs))
        return x, aux, None if cache is None else cache.append(keys, segments, _sliding(config))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, T, vocab_size] of the last block's output [B, T, hidden_size]."""
        return product(self.norm(x), self.projection)

    def hidden(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Return the hidden states [B, T, hidden_size] whose product with `projection` are the logits."""
        return self.norm(self.features(tokens, rng, positions, segments, None)[0])

    @property
    def projection(self) -> jax.Array:
        """Kernel [hidden_size, vocab_size] of the language-modeling head."""
        return self.embed_tokens[...].T if self.lm_head is None else self.lm_head[...]

    def output(self, logits: jax.Array, aux: Any) -> Any:
        """Return the result of a call without a cache; `aux` stacks the auxiliary outputs of the layers' MLPs."""
        del aux
        return logits

    @property
    def context_length(self) -> int:
        """Number of tokens in the sequences that the model is trained on."""
        return self.config.max_position_embeddings

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """Return a cache for `slots` tokens in each of `rows` rows, in the dtype of the parameters."""
        config = self.config
        shape = (rows, slots, config.num_key_value_heads, config.head_dim)
        return KVCache.empty(config.windows, shape, self.embed_tokens[...].dtype)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens]
        if self.config.pad_token_id is None:
            return x
        # `torch.nn.Embedding(padding_idx=…)`.
        return jnp.where((tokens == self.config.pad_token_id)[..., None], lax.stop_gradient(x), x)


class LayerKind(NamedTuple):
    """What differs by layer, arrays [L], or [] of one layer; None where all layers are alike.

    Attributes:
      is_sliding: bool, whether the layer has the window.
      has_rope: bool, whether the layer has rotary positions.
      number: int32, number of the layer among those of its kind in a cache; None without a cache.
    """

    is_sliding: Any
    has_rope: Any
    number: Any


class VisibleByKind(NamedTuple):
    """What the layers attend to, those without a window and those with it; None if there are none of a kind."""

    full: Visible | None
    sliding: Visible | None


def _sliding(config: LlamaConfig) -> np.ndarray:
    return np.array([window is not None for window in config.windows])


def _layer_kinds(config: LlamaConfig, cache: KVCache | None) -> LayerKind:
    sliding, rope_layers = _sliding(config), config.no_rope_layers
    return LayerKind(
        None if len({*config.windows}) == 1 else sliding,
        None if rope_layers is None else np.array(rope_layers, bool),
        None if cache is None else _numbers_by_kind(sliding),
    )


def _numbers_by_kind(sliding: np.ndarray) -> np.ndarray:
    """Return the number of each layer among those of its kind, int32.

    >>> _numbers_by_kind(np.array([True, False, True])).tolist()
    [0, 0, 1]
    """
    numbers: np.ndarray = np.where(sliding, np.cumsum(sliding), np.cumsum(~sliding)).astype(np.int32) - np.int32(1)
    return numbers


def _visible(config: LlamaConfig, t: int, segments: jax.Array | None, cache: KVCache | None) -> VisibleByKind:
    window, is_sliding = config.sliding_window, _sliding(config)
    full = None if is_sliding.all() else visible_keys(t, segments, None, cache)
    sliding = visible_keys(t, segments, window, cache) if is_sliding.any() else None
    if full is not None and full.slots is None and sliding is not None and window is not None:
        if window >= t:
            return VisibleByKind(full, None)
        if not is_long(t, t):
            return VisibleByKind(full.with_mask(t, None), sliding.with_mask(t, window))
    return VisibleByKind(full, sliding)


def _select_cos_sin(cos_sin: tuple[jax.Array, jax.Array], kind: LayerKind) -> tuple[jax.Array, jax.Array]:
    cos, sin = cos_sin
    return cos_sin if kind.has_rope is None else (jnp.where(kind.has_rope, cos, 1), jnp.where(kind.has_rope, sin, 0))


def gated_silu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Compute silu(gate) · x, each factor rounded as by PyTorch's kernels."""
    gated: jax.Array = recomputed(_gated_silu)(gate, x)
    return gated


def _gated_silu(gate: jax.Array, x: jax.Array) -> jax.Array:
    return silu(gate) * x


def silu(x: jax.Array) -> jax.Array:
    """Compute x · σ(x) as one kernel, as PyTorch does."""
    activated: jax.Array = kernel(jax.nn.silu)(x)
    return activated


def _linear(config: LlamaConfig, n: int, m: int, *, bias: bool, rngs: nnx.Rngs) -> Linear:
    normal = nnx.initializers.normal(config.initializer_range)
    return Linear(n, m, use_bias=bias, kernel_init=normal, rngs=rngs)
