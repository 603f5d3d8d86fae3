"""The configuration of a model of the Llama family, and its form in the config.json of `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from jaxtrain.errors import UserError
from jaxtrain.models.files.hf_config import require
from jaxtrain.models.layers import rope
from jaxtrain.models.layers.rope import DEFAULT, Rope

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

_QWEN_SIZES = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        **{"sliding_window": 4096, "num_key_value_heads": 8, "intermediate_size": 14336},
        **{"max_position_embeddings": 131072},
    },
    "qwen2": {"sliding_window": 4096, "num_key_value_heads": 32, **_QWEN_SIZES},
    "qwen3": {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128, **_QWEN_SIZES},
    "smollm3": {
        **{"num_key_value_heads": 4, "tie_word_embeddings": True, "pad_token_id": 128004, "rope_theta": 2e6},
        **{"vocab_size": 128256, "max_position_embeddings": 32768},
    },
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
    def windows(self) -> tuple[int | None, ...]:
        """Number of tokens that a token attends to in each layer, itself included; None for all earlier ones."""
        types = self.layer_types or (SLIDING,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in types)

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.model_type == "qwen3"


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
    # Not a copy, so that a record notes what is looked up.
    config = _HF_DEFAULTS[config["model_type"]] | cast(dict[str, Any], config)
    values = {field.name: config[field.name] for field in fields(kind) if config.get(field.name) is not None}
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
