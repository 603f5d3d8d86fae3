"""Batches of tokens, padded or packed, and the loss of language models in both frameworks."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import jaxtrain
from jaxtrain.losses import cross_entropy
from parity.case import Batch

IGNORED = -100
"""Label of a token without a target, the default of `torch.nn.functional.cross_entropy`."""

PADDING = 5
"""Number of padding tokens in each row, constant so that micro-batches have equal weights."""


def padded(seed: int, rows: int, length: int, vocab_size: int) -> Batch:
    """Return sequences in rows of `length`, padded at both ends.

    Returns:
      "tokens", "labels", "positions" and "segments" (0 for padding), int64[rows, length] each.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=(rows, length))
    place = np.arange(length) - rng.integers(PADDING + 1, size=(rows, 1))
    real = (place >= 0) & (place < length - PADDING)
    return {
        "tokens": tokens,
        "labels": np.where(real & np.roll(real, -1, axis=1), np.roll(tokens, -1, axis=1), IGNORED),
        "positions": np.clip(place, 0, length - PADDING - 1),
        "segments": real.astype(np.int64),
    }


def packed(seed: int, rows: int, length: int, vocab_size: int) -> Batch:
    """Return rows of three sequences without padding, in the format of `padded`."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab_size, size=(rows, length))
    starts = np.array([np.sort(rng.choice(np.arange(1, length), 2, replace=False)) for _ in range(rows)])
    place = np.arange(length)
    segments = 1 + (place >= starts[:, :1]) + (place >= starts[:, 1:])
    first = np.where(segments == 1, 0, np.where(segments == 2, starts[:, :1], starts[:, 1:]))
    last = np.diff(segments, axis=1, append=4) > 0
    return {
        "tokens": tokens,
        "labels": np.where(last, IGNORED, np.roll(tokens, -1, axis=1)),
        "positions": place - first,
        "segments": segments,
    }


def loss(logits: jax.Array, labels: jax.Array) -> jaxtrain.Loss:
    """Return the cross-entropy summed over the labels [B, T] that are not ignored; their number is the weight."""
    counted = labels != IGNORED
    losses = cross_entropy(logits, jnp.where(counted, labels, 0))
    # Row by row: XLA:CPU sums an array sequentially, PyTorch pairwise and four times as exactly.
    rows = lax.optimization_barrier(jnp.where(counted, losses, 0).sum(axis=1))
    return jaxtrain.Loss(rows.sum(), weight=counted.sum())


def torch_model(config: Mapping[str, Any]) -> Module:
    """Return the model of `transformers` for a config.json."""
    given = dict(config)
    # The default ids exceed a small vocabulary.
    kind = AutoConfig.for_model(given.pop("model_type"), **{"bos_token_id": None, "eos_token_id": None, **given})
    return AutoModelForCausalLM.from_config(kind)


def torch_padded_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss of a padded batch."""
    mask = batch["segments"] != 0
    return torch_loss(model(batch["tokens"], attention_mask=mask, position_ids=batch["positions"]).logits, batch)


def torch_packed_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss of a packed batch, which `transformers` recognizes by its positions."""
    return torch_loss(model(batch["tokens"], position_ids=batch["positions"], use_cache=False).logits, batch)


def torch_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss of PyTorch's logits, as `loss`."""
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())
