"""GPT-2 against `transformers.GPT2LMHeadModel`."""

from collections.abc import Mapping
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

CONFIG = GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=4)
TOKENS = 17


def case(config: GPT2Config = CONFIG) -> Case:
    """Rows of 17 tokens, of which the first 16 predict the last 16. `config` is that of the JAX model."""
    apply, params_like = functional(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        tokens = batch["tokens"]
        logits, labels = apply(params, tokens[:, :-1], rng), tokens[:, 1:]
        losses = cross_entropy(logits.reshape(labels.size, -1), labels.reshape(-1))
        return jaxtrain.Loss(losses.sum(), weight=losses.size), {}

    return Case(
        name="gpt2",
        torch_model=_torch_model,
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(),
        batch=_batch,
        rows=16,
        # With the default eps, Adam makes steps of the rounding noise that is the gradient of the key bias.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=0.6,
    )


def _torch_model() -> Module:
    config = HFConfig(
        vocab_size=CONFIG.vocab_size,
        n_positions=CONFIG.n_positions,
        n_embd=CONFIG.n_embd,
        n_layer=CONFIG.n_layer,
        n_head=CONFIG.n_head,
        resid_pdrop=CONFIG.dropout,
        embd_pdrop=CONFIG.dropout,
        attn_pdrop=CONFIG.dropout,
        # The default ones are out of a small vocabulary's range.
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    tokens = batch["tokens"]
    logits, labels = model(tokens[:, :-1]).logits, tokens[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def _batch(seed: int, rows: int) -> Batch:
    return {"tokens": np.random.default_rng(seed).integers(CONFIG.vocab_size, size=(rows, TOKENS))}
