"""The Llama family, as `transformers` computes it: Llama 2 and 3 (SmolLM is one), Mistral, Qwen2, Qwen3 and SmolLM3.

RMSNorm before each half of a block, rotary positions, grouped queries, SwiGLU. Blocks are stacked, scanned and marked
as those of GPT-2 (`jaxtrain.models.gpt2`), with the same names for rematerialisation.
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
from jaxtrain.models.decoder import Kept, KVCache, behind, expecting, places, remembered, visible
from jaxtrain.models.hf_config import require
from jaxtrain.models.linear import Linear, product
from jaxtrain.models.rope import DEFAULT, Rope, rotated, rotation
from jaxtrain.transforms import block, kernel

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""What `transformers` calls each member of the family, and its class there; mixtral is `jaxtrain.models.mixtral`'s."""

LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"

_BY_LAYER = ("qwen2", "qwen3", "smollm3")
"""Those whose layers may differ, in whether they have the window."""

MOST_LAYERS = 10_000
"""That a config.json may say: what differs by layer is listed before anything is known to be true."""

_ALIKE = {"layer_types": None, "no_rope_layers": None}
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None, **_ALIKE},
    "mistral": {"attention_bias": False, "mlp_bias": False, **_ALIKE},
    "qwen2": {"attention_bias": False, "mlp_bias": False, "no_rope_layers": None},
    "qwen3": {"mlp_bias": False, "no_rope_layers": None},
    "smollm3": {},
    "mixtral": {"attention_bias": False, "mlp_bias": False, **_ALIKE},
}
"""The switches that each has not."""

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "pad_token_id": 128004, "rope_theta": 2e6},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6},
}
"""What `transformers` takes where a config.json does not say, and would not of a llama."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches; the names, and the defaults, are those of `transformers.LlamaConfig`.

    `model_type` is one of `MODEL_TYPES`: "qwen2" has biases on queries, keys and values, "qwen3" norms on queries and
    keys. `attention_bias` puts biases on all four projections. With a `sliding_window` a token sees itself and as many
    before it as make that number: in every layer, or in those that are "sliding_attention" in `layer_types`, the others
    being "full_attention". Of `no_rope_layers` it is the zeros that have no rotary positions. The embedding of
    `pad_token_id` is not trained.
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
                raise UserError(f"{name} {getattr(self, name)!r} is not what a {self.model_type} has: leave it out")
        layers = self.num_hidden_layers
        for name, given in (("no_rope_layers", self.no_rope_layers), ("layer_types", self.layer_types)):
            if given is not None and len(given) != layers:
                raise UserError(f"{name} are {len(given)}, num_hidden_layers {layers}: give one for each layer")
        if unknown := {*(self.layer_types or ())} - {*LAYER_TYPES}:
            raise UserError(f"layer_types {min(unknown)!r} is not supported: choose of {', '.join(LAYER_TYPES)}")
        if self.layer_types is not None and SLIDING in self.layer_types and self.sliding_window is None:
            raise UserError(f"layer_types {SLIDING!r} needs a sliding_window: give one")

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether the heads of queries and keys are normalised."""
        return self.model_type == "qwen3"


class RMSNorm(nnx.Module):
    """x / √(mean x² + ε) · scale over the last axis (Zhang and Sennrich 2019).

    As in `transformers` the quotient is taken in float32, or better, and rounded to the dtype of `x` before it is
    scaled.
    """

    def __init__(self, features: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        normalised = kernel(partial(_over_root_mean_square, epsilon=self.epsilon))(x)
        return normalised * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


def _over_root_mean_square(x: jax.Array, *, epsilon: float) -> jax.Array:
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


class Attention(nnx.Module):
    """[B, T, hidden_size] → heads' outputs [B, T, num_attention_heads · head_dim], before the output projection."""

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
        turn: tuple[jax.Array, jax.Array],
        mask: jax.Array | None,
        rng: jax.Array | None,
        kept: Kept | None,
        at: jax.Array | None,
    ) -> tuple[jax.Array, Kept | None]:
        b, t, _ = x.shape
        q, k, v = (proj(x).reshape(b, t, -1, self.config.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, *turn), rotated(k, *turn)
        k, v, kept = remembered(k, v, kept, at)
        causal, dropout = mask is None, self.config.attention_dropout
        attended = attention(q, k, v, mask=mask, causal=causal, dropout=dropout, rng=rng).reshape(b, t, -1)
        return self.o_proj(checkpoint_name(attended, "attention")), kept


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020): silu(gate(x)) · up(x), projected down: [B, T, hidden_size] → the same, and None."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        width, hidden, linear = config.hidden_size, config.intermediate_size, partial(_linear, config, rngs=rngs)
        self.gate_proj = linear(width, hidden, bias=config.mlp_bias)
        self.up_proj = linear(width, hidden, bias=config.mlp_bias)
        self.down_proj = linear(hidden, width, bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(silu(self.gate_proj(x)) * self.up_proj(x), "hidden")
        return self.down_proj(hidden), None


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, T, hidden_size] → the same, what the MLP tells besides, and
    the keys and values kept."""

    def __init__(self, config: LlamaConfig, mlp: Callable[..., Any], *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, *context: Any) -> tuple[jax.Array, Any, Any]:
        attended, kept = self.self_attn(self.input_layernorm(x), *context)
        x = x + attended
        y, told = self.mlp(self.post_attention_layernorm(x))
        return x + y, told, kept


class Llama(nnx.Module):
    """Tokens int [B, T] → logits [B, T, vocab_size]; with a cache, (logits, the cache with these tokens).

    With a dropout key it is in training mode. `positions` int [B, T] count from 0 by default, or from where the cache
    ends; tokens see those of their own segment only, `segments` int [B, T], so that several sequences can be packed
    into a row, each with positions of its own, and padding (a segment of its own, by convention 0) is not seen.
    """

    feed_forward: ClassVar[Callable[..., Any]] = MLP

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
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
        cache, segments = expecting(cache, segments, tokens)
        masks = _masks(config, t, segments, cache)
        x = self._embedded(tokens)
        turn = rotation(config.rope_parameters, places(positions, t, cache), config.head_dim, x.dtype)
        graphdef, layers = nnx.split(self.layers)

        @block
        def apply(layer: Any, kind: Kind, x: jax.Array, turn: Any, masks: Any, *context: Any) -> Any:
            return nnx.merge(graphdef, layer)(x, _turn(turn, kind), _mask(masks, kind), *context)

        rngs = None if rng is None else jax.random.split(rng, config.num_hidden_layers)
        at, kept = (None, None) if cache is None else (cache.length, (cache.k, cache.v))

        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            x, told, kept = apply(*layer[:2], x, turn, masks, *layer[2:], at)
            return x, (told, kept)

        x, (told, kept) = lax.scan(step, x, (layers, _kinds(config), rngs, kept))
        head = self.embed_tokens[...].T if self.lm_head is None else self.lm_head[...]
        logits = product(self.norm(x), head)
        return self.output(logits, told) if cache is None else (logits, cache.holding(kept, t))

    def output(self, logits: jax.Array, told: Any) -> Any:
        """What a call without a cache returns, given what each layer's MLP tells besides, stacked."""
        del told
        return logits

    @property
    def context_length(self) -> int:
        """Largest number of tokens of the texts that the model is trained on."""
        return self.config.max_position_embeddings

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """For `slots` tokens in each of `rows`, in the dtype of the parameters."""
        config, dtype = self.config, self.embed_tokens[...].dtype
        return KVCache.empty(config.num_hidden_layers, rows, slots, config.num_key_value_heads, config.head_dim, dtype)

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens]
        if self.config.pad_token_id is None:
            return x
        # `torch.nn.Embedding(padding_idx=…)`.
        return jnp.where((tokens == self.config.pad_token_id)[..., None], lax.stop_gradient(x), x)


class Kind(NamedTuple):
    """Of every layer, bool [L], or of one: whether it has the window, and rotary positions; None if all are alike."""

    slides: Any
    turns: Any


def _kinds(config: LlamaConfig) -> Kind:
    slides, turns = config.layer_types, config.no_rope_layers
    return Kind(
        None if slides is None else np.array([kind == SLIDING for kind in slides]),
        None if turns is None else np.array(turns, bool),
    )


def _masks(config: LlamaConfig, t: int, segments: jax.Array | None, cache: KVCache | None) -> tuple[Any, Any]:
    """(that of all layers, None); or that of those without the window, and of those with it."""
    narrow = visible(t, segments, config.sliding_window, cache)
    if config.layer_types is None or narrow is None:
        return narrow, None
    wide = visible(t, segments, None, cache)
    return behind(t, t, 0, None) if wide is None else wide, narrow


def _mask(masks: tuple[Any, Any], kind: Kind) -> Any:
    wide, narrow = masks
    return wide if narrow is None else jnp.where(kind.slides, narrow, wide)


def _turn(turn: tuple[jax.Array, jax.Array], kind: Kind) -> tuple[jax.Array, jax.Array]:
    cos, sin = turn
    return turn if kind.turns is None else (jnp.where(kind.turns, cos, 1), jnp.where(kind.turns, sin, 0))


def silu(x: jax.Array) -> jax.Array:
    """x · σ(x), which PyTorch has a kernel for."""
    silued: jax.Array = kernel(jax.nn.silu)(x)
    return silued


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
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`), as those of GPT-2."""


def torch_names(config: LlamaConfig) -> NameTable:
    """The names in the `transformers` model of the same type."""
    return name_table(config, _linear_names({f"mlp.{name}_proj": config.mlp_bias for name in ("gate", "up", "down")}))


def name_table(config: LlamaConfig, mlp: Mapping[str, TorchParam]) -> NameTable:
    """The table of a model of the family, given what its MLPs are made of."""
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
    """The `LlamaConfig` of a Hugging Face config.json, of today's `transformers` or older.

    Raises `UserError` for what would change the numbers and is not supported.
    """
    model_type, known = config.get("model_type"), [name for name in MODEL_TYPES if name != "mixtral"]
    if model_type not in known:
        raise UserError(f"model_type {model_type!r} is not of the family: choose one of {', '.join(known)}")
    return LlamaConfig(**fields_from_hf(config, LlamaConfig))


def fields_from_hf(config: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of `kind`, a `LlamaConfig`, that a config.json sets; what it leaves out as `transformers` has it."""
    require(config, hidden_act="silu", quantization_config=None, router_jitter_noise=0.0, is_causal=True)
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise UserError(f"num_hidden_layers {config['num_hidden_layers']} is more than {MOST_LAYERS}: correct it")
    config = {**_LEFT_OUT[config["model_type"]], **config}
    given = {key: value for key, value in config.items() if value is not None}
    found = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    found["rope_parameters"] = rope.from_hf(config)
    found.setdefault("num_key_value_heads", config["num_attention_heads"])
    found.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rotary, layers = _rotary_layers(config), config["num_hidden_layers"]
    return found | _windows(config, rotary) | {"no_rope_layers": None if rotary == (1,) * layers else rotary}


def _rotary_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """1 for each layer with rotary positions, 0 for each without; by default every fourth of a smollm3 has none."""
    layers, given = config["num_hidden_layers"], config.get("no_rope_layers")
    if given is None and config["model_type"] == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        given = [(i + 1) % every for i in range(layers)]
    return None if given is None else tuple(int(bool(turns)) for turns in given[:layers])


def _windows(config: Mapping[str, Any], rotary: tuple[int, ...] | None) -> dict[str, Any]:
    """`sliding_window`; and `layer_types`, where layers differ."""
    model_type, window, said = config["model_type"], config.get("sliding_window"), config.get("layer_types")
    layers = config["num_hidden_layers"]
    slides = [True] * layers
    if model_type in _BY_LAYER:
        window = window if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        slides = [i >= first for i in range(layers)] if rotary is None else [not turns for turns in rotary]
    usual = tuple(SLIDING if window is not None and own else FULL for own in slides)
    kinds = usual if said is None else tuple(said)
    if model_type not in _BY_LAYER and kinds != usual:
        raise UserError(f"layer_types {sorted({*kinds})} are not what a {model_type} has: leave them out")
    if kinds == (FULL,) * layers:
        return {"sliding_window": None, "layer_types": None}
    alike = window is not None and kinds == (SLIDING,) * layers
    return {"sliding_window": window, "layer_types": None if alike else kinds}


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """A config.json that `transformers` reads back into the same model.

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
