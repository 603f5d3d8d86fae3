"""The configuration of a T5, and its form in the config.json of `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.models.files.hf_config import require

FEED_FORWARD = ("relu", "gated-gelu")


@dataclass(frozen=True)
class T5Config:
    """Configuration of a T5, with the field names of `transformers.T5Config`.

    Attributes:
      dropout: `dropout_rate` of `transformers`.
      feed_forward_proj: One of `FEED_FORWARD`.
      tie_word_embeddings: Whether the output layer shares the embedding; if not, its input is not scaled (v1.1, FLAN).

    Raises:
      UserError: `feed_forward_proj` is not supported.
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
            raise UserError(
                f"feed_forward_proj must be one of {', '.join(FEED_FORWARD)}, got {self.feed_forward_proj!r}"
            )


def is_gated(feed_forward_proj: str) -> bool:
    """Return whether the MLP of a `feed_forward_proj` multiplies by a gate."""
    return feed_forward_proj.startswith("gated-")


def from_hf(config: Mapping[str, Any]) -> T5Config:
    """Return the `T5Config` of a Hugging Face config.json.

    Raises:
      UserError: A setting that changes the result is not supported.
    """
    shared = {
        "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets",
        "relative_attention_max_distance", "layer_norm_epsilon", "initializer_factor", "feed_forward_proj",
    }  # fmt: skip
    given = {name: config[name] for name in shared if name in config}
    gated = is_gated(config.get("feed_forward_proj", "relu"))
    # In `transformers` these two override feed_forward_proj.
    activation = "gelu_new" if gated else "relu"
    require(config, dense_act_fn=activation, is_gated_act=gated, quantization_config=None, is_causal=True)
    depth = config.get("num_decoder_layers")
    tokens = {name: config.get(name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    # `transformers` 5 always writes true for tie_word_embeddings; scale_decoder_outputs holds the original value.
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return T5Config(
        **given,
        **{name: token for name, token in tokens.items() if token is not None},
        num_decoder_layers=config.get("num_layers", T5Config.num_layers) if depth is None else depth,
        dropout=config.get("dropout_rate", 0.1),
        tie_word_embeddings=tied is not False,
    )


def to_hf(config: T5Config) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model."""
    fields = {name: getattr(config, name) for name in T5Config.__dataclass_fields__ if name != "dropout"}
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "dropout_rate": config.dropout,
        **fields,
    }
