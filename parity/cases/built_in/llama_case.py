"""The Llama family against `transformers`: Llama, Mistral, Qwen2, Qwen3; padded and packed rows."""

from dataclasses import replace
from typing import Any

from flax import nnx

import jaxtrain
from jaxtrain.models import Rope, functional
from jaxtrain.models.llama import Llama, LlamaConfig, to_hf, torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import token_batches

# Of four frequencies the first is above the bounds of the scaling, the second between and the others below them.
LLAMA3 = Rope(
    rope_theta=100.0,
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
# Of eight frequencies the first are extrapolated, the last interpolated and the others between.
YARN = Rope(
    rope_theta=100.0,
    rope_type="yarn",
    factor=4.0,
    beta_fast=2.0,
    beta_slow=0.5,
    original_max_position_embeddings=32,
)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LLAMA = LlamaConfig(**SIZES, rope_parameters=LLAMA3, pad_token_id=3)
PACKED = LlamaConfig(
    **{**SIZES, "head_dim": 16, "max_position_embeddings": 128},
    rope_parameters=YARN,
    attention_bias=True,
    mlp_bias=True,
)
QWEN3 = LlamaConfig(
    **{**SIZES, "head_dim": 16, "num_key_value_heads": 1},
    model_type="qwen3",
    tie_word_embeddings=True,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
)
MISTRAL = LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, model_type="mistral", sliding_window=5)
TOKENS = 17


def case(dropout: float | None = None) -> Case:
    """Return Llama with grouped queries, Llama 3.1's rotary scaling and a padding token, on padded rows."""
    return sized("llama", LLAMA, dropout)


def qwen3(dropout: float | None = None) -> Case:
    """Return Qwen3: norms on queries and keys, wider heads that share one key, a window in one layer."""
    return sized("llama.qwen3", QWEN3, dropout, clip_norm=1.95)


def mistral(dropout: float | None = None) -> Case:
    """Return Mistral with a window shorter than the rows, and a key for every query head."""
    return sized("llama.mistral", MISTRAL, dropout)


def packed(dropout: float | None = None) -> Case:
    """Return Llama with biases and YaRN, on rows of three sequences, which do not attend to each other."""
    return sized("llama.packed", PACKED, dropout, packed=True, clip_norm=1.4)


def sized(
    name: str,
    config: LlamaConfig,
    dropout: float | None = None,
    *,
    packed: bool = False,
    clip_norm: float = 1.75,
    rows: int = 8,
    tokens: int = TOKENS,
) -> Case:
    """Return a case on batches of `rows` × `tokens`."""
    if dropout is not None:
        config = replace(config, attention_dropout=dropout)
    apply, params_like = functional(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    draw = token_batches.packed if packed else token_batches.padded

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        logits = apply(params, batch["tokens"], rng, batch["positions"], batch["segments"])
        return token_batches.loss(logits, batch["labels"]), {}

    return Case(
        name=name,
        torch_model=lambda: token_batches.torch_model(to_hf(config)),
        torch_loss=token_batches.torch_packed_loss if packed else token_batches.torch_padded_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(config),
        batch=lambda seed, rows: draw(seed, rows, tokens, config.vocab_size),
        rows=rows,
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=clip_norm,
    )
