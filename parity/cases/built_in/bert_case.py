"""BERT against `transformers.BertForMaskedLM` and `BertForSequenceClassification`, on rows padded unevenly."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers import BertConfig as HFConfig
from transformers import BertForMaskedLM, BertForSequenceClassification

import jaxtrain
from jaxtrain.losses import cross_entropy, label_weights
from jaxtrain.models import functional
from jaxtrain.models.bert import Bert, BertConfig, to_hf, torch_names
from parity.case import AdamW, Batch, Case

CONFIG = BertConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=12,
)
CLASSES = 4


def case(dropout: float = 0.0) -> Case:
    """Return the masked language model: a quarter of each row is predicted, one token of it padding."""
    return sized(_dropping(CONFIG, dropout))


def sized(config: BertConfig, rows: int = 16) -> Case:
    """Return the masked language model on `rows` rows of the config's length."""
    return _case("bert", config, BertForMaskedLM, "label", clip_norm=1.25, rows=rows)


def classifier(dropout: float = 0.0) -> Case:
    """Return the classifier of rows."""
    config = replace(_dropping(CONFIG, dropout), num_labels=CLASSES)
    return _case("bert.classifier", config, BertForSequenceClassification, "class", clip_norm=0.3)


def _case(
    name: str,
    config: BertConfig,
    torch_class: Callable[[HFConfig], Module],
    label: str,
    clip_norm: float,
    rows: int = 16,
) -> Case:
    apply, params_like = functional(nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        logits = apply(params, batch["token"], batch["mask"], batch["type"], rng)
        losses = cross_entropy(logits, batch[label])
        return jaxtrain.Loss(losses.sum(), label_weights(batch[label]).sum()), {}

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        inputs = {"attention_mask": batch["mask"], "token_type_ids": batch["type"]}
        logits, labels = model(batch["token"], **inputs).logits, batch[label]
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return total, int((labels != -100).sum())

    return Case(
        name=name,
        torch_model=lambda: torch_class(HFConfig(**to_hf(config))),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(config),
        batch=lambda seed, rows: _batch(seed, rows, config),
        rows=rows,
        # With the default eps, Adam makes steps of the rounding noise that is the gradient of the key bias.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=clip_norm,
    )


def _dropping(config: BertConfig, rate: float) -> BertConfig:
    """Return the config with three different rates, of which `rate` is the largest."""
    return replace(
        config, hidden_dropout_prob=rate, attention_probs_dropout_prob=rate / 2, classifier_dropout=rate * 3 / 4
    )


def _batch(seed: int, rows: int, config: BertConfig) -> Batch:
    """Rows at least half full, of the second type from the middle on, with equally many labels per row."""
    rng, tokens = np.random.default_rng(seed), config.max_position_embeddings
    place, predictions = np.arange(tokens), tokens // 4
    real = place < rng.integers(tokens // 2, tokens + 1, size=(rows, 1))
    token = np.where(real, rng.integers(1, config.vocab_size, size=(rows, tokens)), 0)
    token[:, 1] = 0  # a padding token that others attend to, whose embedding would otherwise be trained
    predicted = rng.permuted(np.tile(place[: tokens // 2], (rows, 1)), axis=1)[:, :predictions]
    label = np.full((rows, tokens), -100)
    wanted = rng.integers(1, config.vocab_size, size=(rows, predictions))
    wanted[:, 0] = 0  # the padding token, whose embedding learns from being predicted only
    np.put_along_axis(label, predicted, wanted, axis=1)
    return {
        "token": token,
        "mask": real.astype(np.int64),
        "type": (place >= rng.integers(1, tokens, size=(rows, 1))).astype(np.int64),
        "label": label,
        "class": rng.integers(CLASSES, size=rows),
    }
