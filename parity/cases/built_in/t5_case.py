"""T5 against `transformers.T5ForConditionalGeneration`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers import T5Config as HFConfig
from transformers import T5ForConditionalGeneration

import jaxtrain
from jaxtrain.losses import cross_entropy
from jaxtrain.models import functional
from jaxtrain.models.t5 import IGNORE_INDEX, T5, T5Config, shift_right, to_hf, torch_names
from parity.case import AdamW, Batch, Case

CONFIG = T5Config(
    vocab_size=31,
    d_model=16,
    d_kv=4,
    d_ff=24,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    # All of them are met within a sentence.
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    # Not the padding token, as in the files of all T5s.
    decoder_start_token_id=2,
)
SOURCE, TARGET = 13, 12


def case(
    config: T5Config = CONFIG,
    *,
    dropout: float | None = None,
    rows: int = 16,
    clip_norm: float = 0.75,
    source: int = SOURCE,
    target: int = TARGET,
) -> Case:
    """Return a case on `rows` padded pairs of `source` and `target` tokens.

    `dropout`, if given, is the rate of both sides.
    """
    if dropout is not None:
        config = replace(config, dropout=dropout)
    apply, params_like = functional(nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        labels, there = batch["labels"], batch["labels"] != IGNORE_INDEX
        decoder_tokens = shift_right(labels, config)
        logits = apply(params, batch["tokens"], decoder_tokens, batch["tokens"] != config.pad_token_id, None, rng)
        losses = cross_entropy(logits, jnp.where(there, labels, 0))
        return jaxtrain.Loss(jnp.where(there, losses, 0).sum(), weight=there.sum()), {}

    return Case(
        name="t5" if config.tie_word_embeddings else "t5.gated",
        torch_model=lambda: _torch_model(config),
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(config),
        batch=lambda seed, rows: _batch(seed, rows, config, source, target),
        rows=rows,
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=clip_norm,
    )


def gated(*, dropout: float | None = None, rows: int = 16) -> Case:
    """Return the case of v1.1 and FLAN-T5: a gated GELU and a separate output layer."""
    config = replace(CONFIG, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return case(config, dropout=dropout, rows=rows, clip_norm=6.0)


def _torch_model(config: T5Config) -> Module:
    model = T5ForConditionalGeneration(HFConfig(**to_hf(config)))
    if not config.tie_word_embeddings:  # which transformers unties only as it reads such weights
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().flip(0).clone())
    return model


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    tokens, labels = batch["tokens"], batch["labels"]
    logits = model(tokens, attention_mask=tokens != CONFIG.pad_token_id, labels=labels).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != IGNORE_INDEX).sum())


def _batch(seed: int, rows: int, config: T5Config, source: int, target: int) -> Batch:
    """Lengths that differ, with equal weights of any four neighboring rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, config.vocab_size, size=(rows, source))
    labels = rng.integers(1, config.vocab_size, size=(rows, target))
    missing = np.arange(rows)[:, None] % 4
    tokens[np.arange(source)[None] >= source - source // 6 * missing] = config.pad_token_id
    labels[np.arange(target)[None] >= target - target // 12 * missing] = IGNORE_INDEX
    labels[:, target // 3] = IGNORE_INDEX  # followed by labels, so that the decoder's input there matters
    return {"tokens": tokens, "labels": labels}
