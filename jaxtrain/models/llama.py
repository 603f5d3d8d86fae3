"""The Llama family, as `transformers` computes it: Llama 2 and 3 (including SmolLM), Mistral, Qwen2, Qwen3, SmolLM3.

Blocks have RMSNorm before each half, rotary positions, grouped queries and SwiGLU. They are stacked and scanned as
those of GPT-2 (`jaxtrain.models.gpt2`), with the same names for rematerialization.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models import rope
from jaxtrain.models.attention import attention
from jaxtrain.models.decoder import (
    KVCache,
    LayerCache,
    attention_mask,
    reserve,
    sliding_window_mask,
    token_positions,
    update_cache,
)
from jaxtrain.models.hf_config import require
from jaxtrain.models.linear import Linear, product
from jaxtrain.models.rope import DEFAULT, Rope, apply_rotary, rotary_cos_sin
from jaxtrain.transforms import block, kernel, recomputed

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""Class in `transformers` by model type; "mixtral" is implemented in `jaxtrain.models.mixtral`."""

LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"

_BY_LAYER = ("qwen2", "qwen3", "smollm3")
"""Model types with a `layer_types` setting."""

MAX_LAYERS = 10_000
"""Upper bound of `num_hidden_layers` in a config.json: per-layer settings are expanded before weights are checked."""

_ALIKE = {"layer_types": None, "no_rope_layers": None}
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None, **_ALIKE},
    "mistral": {"attention_bias": False, "mlp_bias": False, **_ALIKE},
    "qwen2": {"attention_bias": False, "mlp_bias": False, "no_rope_layers": None},
    "qwen3": {"mlp_bias": False, "no_rope_layers": None},
    "smollm3": {},
    "mixtral": {"attention_bias": False, "mlp_bias": False, **_ALIKE},
}
"""Settings that a model type does not have, with the only value they may take."""

_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "pad_token_id": 128004, "rope_theta": 2e6},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6},
}
"""Defaults of `transformers` for keys missing in a config.json, where they differ from those of a llama."""


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a model of the family, with the field names and defaults of `transformers.LlamaConfig`.

    Attributes:
      model_type: One of `MODEL_TYPES`. "qwen2" has biases on queries, keys and values, "qwen3" norms on queries and
        keys.
      rope_parameters: Base and scaling of the rotary embeddings.
      attention_bias: Whether all four projections of the attention have biases.
      sliding_window: Number of tokens that a token attends to, itself included; None for all earlier ones.
      layer_types: "full_attention" or "sliding_attention" for every layer; None if all layers have the window.
      no_rope_layers: 1 for a layer with rotary positions, 0 for one without; None if all have them.
      pad_token_id: Token whose embedding gets no gradient, as `torch.nn.Embedding(padding_idx=…)`; None for no such
        token.

    Raises:
      UserError: A setting does not exist for the model type, a per-layer setting has the wrong length or value.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rope_parameters: Rope = DEFAULT
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    initializer_range: float = 0.02
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, value in _ABSENT.get(self.model_type, {}).items():
            if getattr(self, name) != value:
                raise UserError(f"{name} {getattr(self, name)!r} is not a setting of {self.model_type}: leave it out")
        layers = self.num_hidden_layers
        for name, given in (("no_rope_layers", self.no_rope_layers), ("layer_types", self.layer_types)):
            if given is not None and len(given) != layers:
                raise UserError(f"{name} must have num_hidden_layers {layers} entries, got {len(given)}")
        if unknown := {*(self.layer_types or ())} - {*LAYER_TYPES}:
            raise UserError(f"layer_types {min(unknown)!r} is not supported: choose from {', '.join(LAYER_TYPES)}")
        if self.layer_types is not None and SLIDING in self.layer_types and self.sliding_window is None:
            raise UserError(f"layer_types {SLIDING!r} needs sliding_window: set it")

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.model_type == "qwen3"


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
        mask: jax.Array | None,
        rng: jax.Array | None,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        b, t, _ = x.shape
        q, k, v = (proj(x).reshape(b, t, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
        k, v, cache = update_cache(k, v, cache)
        causal, dropout = mask is None, self.config.attention_dropout
        window = self.config.sliding_window if causal and self.config.layer_types is None else None
        attended = attention(q, k, v, mask=mask, causal=causal, window=window, dropout=dropout, rng=rng)
        return self.o_proj(checkpoint_name(attended.reshape(b, t, -1), "attention")), cache


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

    It also returns the auxiliary output of the MLP and the updated cache.
    """

    def __init__(self, config: LlamaConfig, mlp: Callable[..., Any], *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, *context: Any) -> tuple[jax.Array, Any, Any]:
        attended, cache = self.self_attn(self.input_layernorm(x), *context)
        x = x + attended
        y, aux = self.mlp(self.post_attention_layernorm(x))
        return x + y, aux, cache


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
        config, t = self.config, tokens.shape[1]
        cache, segments = reserve(cache, segments, tokens)
        masks = _masks(config, t, segments, cache)
        x = self._embed(tokens)
        cos_sin = rotary_cos_sin(config.rope_parameters, token_positions(positions, t, cache), config.head_dim, x.dtype)
        graphdef, layers = nnx.split(self.layers)

        @block
        def apply(layer: Any, kind: LayerKind, x: jax.Array, cos_sin: Any, masks: Any, *context: Any) -> Any:
            return nnx.merge(graphdef, layer)(x, _select_cos_sin(cos_sin, kind), _select_mask(masks, kind), *context)

        rngs = None if rng is None else jax.random.split(rng, config.num_hidden_layers)
        caches = None if cache is None else cache.layers()

        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            x, aux, updated = apply(*layer[:2], x, cos_sin, masks, *layer[2:])
            return x, (aux, updated)

        x, (aux, caches) = lax.scan(step, x, (layers, _layer_kinds(config), rngs, caches))
        head = self.embed_tokens[...].T if self.lm_head is None else self.lm_head[...]
        logits = product(self.norm(x), head)
        return self.output(logits, aux) if cache is None or caches is None else (logits, cache.append(caches))

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
        shape = (config.num_hidden_layers, rows, slots, config.num_key_value_heads, config.head_dim)
        return KVCache.empty(shape, self.embed_tokens[...].dtype)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens]
        if self.config.pad_token_id is None:
            return x
        # `torch.nn.Embedding(padding_idx=…)`.
        return jnp.where((tokens == self.config.pad_token_id)[..., None], lax.stop_gradient(x), x)


class LayerKind(NamedTuple):
    """Switches that differ by layer, bool [L], or bool [] of one layer; None where all layers are alike."""

    is_sliding: Any
    has_rope: Any


def _layer_kinds(config: LlamaConfig) -> LayerKind:
    types, rope_layers = config.layer_types, config.no_rope_layers
    return LayerKind(
        None if types is None else np.array([kind == SLIDING for kind in types]),
        None if rope_layers is None else np.array(rope_layers, bool),
    )


def _masks(config: LlamaConfig, t: int, segments: jax.Array | None, cache: KVCache | None) -> tuple[Any, Any]:
    """Return (mask of all layers, None), or (mask without the window, mask with it) where layers differ.

    None for the causal mask, with the window of all layers if there is one: `attention` has kernels for them.
    """
    if config.layer_types is None and segments is None and cache is None:
        return None, None
    narrow = attention_mask(t, segments, config.sliding_window, cache)
    if config.layer_types is None or narrow is None:
        return narrow, None
    wide = attention_mask(t, segments, None, cache)
    return sliding_window_mask(t, t, 0, None) if wide is None else wide, narrow


def _select_mask(masks: tuple[Any, Any], kind: LayerKind) -> Any:
    wide, narrow = masks
    return wide if narrow is None else jnp.where(kind.is_sliding, narrow, wide)


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


SHARDING = {
    "embed_tokens": P("tensor", "fsdp"),
    "lm_head": P("fsdp", "tensor"),
    "layers/.*/([qkv]|gate|up)_proj/kernel": P(None, "fsdp", "tensor"),
    "layers/.*/([qkv]|gate|up)_proj/bias": P(None, ("tensor", "fsdp")),
    "layers/.*/(o|down)_proj/kernel": P(None, "tensor", "fsdp"),
    "layers/.*/(bias|scale)": P(None, "fsdp"),
    "norm/scale": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path, as for GPT-2."""


def torch_names(config: LlamaConfig) -> NameTable:
    """Return the names in the `transformers` model of the same type."""
    return name_table(config, _linear_names({f"mlp.{name}_proj": config.mlp_bias for name in ("gate", "up", "down")}))


def name_table(config: LlamaConfig, mlp: Mapping[str, TorchParam]) -> NameTable:
    """Return the name table of a model of the family; `mlp` is the part for its MLPs."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    return NameTable({**_embedding_names(config), **_attention_names(config), **mlp}, tied)


def _embedding_names(config: LlamaConfig) -> dict[str, TorchParam]:
    names = {"embed_tokens": TorchParam("model.embed_tokens.weight"), "norm/scale": TorchParam("model.norm.weight")}
    return names if config.tie_word_embeddings else names | {"lm_head": TorchParam("lm_head.weight", LINEAR)}


def _attention_names(config: LlamaConfig) -> dict[str, TorchParam]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
    biased = {f"self_attn.{name}_proj": config.qkv_bias for name in "qkv"}
    return {
        f"layers/{name.replace('.', '/')}/scale": TorchParam(f"model.layers.{{layer}}.{name}.weight") for name in norms
    } | _linear_names(biased | {"self_attn.o_proj": config.attention_bias})


def _linear_names(biased: Mapping[str, bool]) -> dict[str, TorchParam]:
    names = {}
    for name, bias in biased.items():
        ours, theirs = f"layers/{name.replace('.', '/')}", f"model.layers.{{layer}}.{name}"
        names[f"{ours}/kernel"] = TorchParam(f"{theirs}.weight", LINEAR)
        if bias:
            names[f"{ours}/bias"] = TorchParam(f"{theirs}.bias")
    return names


def from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the `LlamaConfig` of a Hugging Face config.json, of the current or an older `transformers`.

    Raises:
      UserError: The model type is not of the family, or a setting that changes the result is not supported.
    """
    model_type, supported = config.get("model_type"), [name for name in MODEL_TYPES if name != "mixtral"]
    if model_type not in supported:
        raise UserError(f"model_type {model_type!r} is not supported: choose one of {', '.join(supported)}")
    return LlamaConfig(**fields_from_hf(config, LlamaConfig))


def fields_from_hf(config: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the fields of `kind`, a `LlamaConfig`, from a config.json.

    Missing keys have the defaults of `transformers` for the model type.
    """
    require(config, hidden_act="silu", quantization_config=None, router_jitter_noise=0.0, is_causal=True)
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise UserError(f"num_hidden_layers must be at most {MAX_LAYERS}, got {config['num_hidden_layers']}")
    config = {**_HF_DEFAULTS[config["model_type"]], **config}
    given = {key: value for key, value in config.items() if value is not None}
    values = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    values["rope_parameters"] = rope.from_hf(config)
    values.setdefault("num_key_value_heads", config["num_attention_heads"])
    values.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotary, layers = _rope_layers(config), config["num_hidden_layers"]
    return values | _windows(config, rotary) | {"no_rope_layers": None if rotary == (1,) * layers else rotary}


def _rope_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return `no_rope_layers`; by default every fourth layer of a smollm3 has no rotary positions."""
    layers, given = config["num_hidden_layers"], config.get("no_rope_layers")
    if given is None and config["model_type"] == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        given = [(i + 1) % every for i in range(layers)]
    return None if given is None else tuple(int(bool(has_rope)) for has_rope in given[:layers])


def _windows(config: Mapping[str, Any], rotary: tuple[int, ...] | None) -> dict[str, Any]:
    """Return `sliding_window`, and `layer_types` where layers differ."""
    model_type, window, given = config["model_type"], config.get("sliding_window"), config.get("layer_types")
    layers = config["num_hidden_layers"]
    sliding = [True] * layers
    if model_type in _BY_LAYER:
        window = window if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        sliding = [i >= first for i in range(layers)] if rotary is None else [not has_rope for has_rope in rotary]
    default = tuple(SLIDING if window is not None and is_sliding else FULL for is_sliding in sliding)
    kinds = default if given is None else tuple(given)
    if model_type not in _BY_LAYER and kinds != default:
        raise UserError(f"layer_types {sorted({*kinds})} is not a setting of {model_type}: leave it out")
    if kinds == (FULL,) * layers:
        return {"sliding_window": None, "layer_types": None}
    all_sliding = window is not None and kinds == (SLIDING,) * layers
    return {"sliding_window": window, "layer_types": None if all_sliding else kinds}


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> from_hf(to_hf(LlamaConfig(model_type="qwen3", sliding_window=8))).sliding_window
      8
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= {"rope_parameters": rope.to_hf(config.rope_parameters), "hidden_act": "silu"}
    values["architectures"] = [MODEL_TYPES[config.model_type]]
    if config.model_type in _BY_LAYER:
        kind = FULL if config.sliding_window is None else SLIDING
        values["use_sliding_window"] = config.sliding_window is not None
        values["layer_types"] = list(config.layer_types or [kind] * config.num_hidden_layers)
        values["no_rope_layers"] = list(config.no_rope_layers or [1] * config.num_hidden_layers)
    for name in _ABSENT[config.model_type]:
        del values[name]
    return values
