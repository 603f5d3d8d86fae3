"""GPT-2 against `transformers.GPT2LMHeadModel`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel

import jaxtrain
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.models.gpt2 import torch_names
from parity.case import AdamW, Batch, Case

CONFIG = GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=4)
TOKENS = 17


def case(
    config: GPT2Config = CONFIG,
    *,
    reference: GPT2Config = CONFIG,
    dropout: float | None = None,
    rows: int = 16,
    tokens: int = TOKENS,
) -> Case:
    """Return a case on batches of `rows` × `tokens` tokens, each predicting the next.

    `config` is the JAX model's and `reference` PyTorch's; `dropout`, if given, is the rate of both.
    """
    if dropout is not None:
        config, reference = replace(config, dropout=dropout), replace(reference, dropout=dropout)
    apply, params_like = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        tokens = batch["tokens"]
        logits, labels = apply(params, tokens[:, :-1], rng), tokens[:, 1:]
        losses = cross_entropy(logits.reshape(labels.size, -1), labels.reshape(-1))
        return jaxtrain.Loss(losses.sum(), weight=losses.size), {}

    return Case(
        name="gpt2",
        torch_model=lambda: _torch_model(reference),
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(),
        batch=lambda seed, rows: _batch(seed, rows, tokens, reference.vocab_size),
        rows=rows,
        # With the default eps, Adam amplifies the gradient of the key bias, which is rounding noise.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=0.6,
    )


def _torch_model(config: GPT2Config) -> Module:
    sizes = HFConfig(
        vocab_size=config.vocab_size,
        n_positions=config.n_positions,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        # The default ids exceed a small vocabulary.
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(sizes)


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    tokens = batch["tokens"]
    logits, labels = model(tokens[:, :-1]).logits, tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def _batch(seed: int, rows: int, tokens: int, vocab_size: int) -> Batch:
    return {"tokens": np.random.default_rng(seed).integers(vocab_size, size=(rows, tokens))}
