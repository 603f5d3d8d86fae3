"""Mixtral against `transformers.MixtralForCausalLM`, with the router's loss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flax import nnx
from torch import Tensor
from torch.nn import Module
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import jaxtrain
from jaxtrain.models import functional
from jaxtrain.models.mixtral import Mixtral, MixtralConfig, load_balancing_loss, to_hf, torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import token_batches

CONFIG = MixtralConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.1,
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
TOKENS = 17


def case(dropout: float | None = None) -> Case:
    """Return Mixtral with four experts, two per token, on padded rows, with the router's loss of the tokens."""
    config = CONFIG if dropout is None else replace(CONFIG, attention_dropout=dropout)
    apply, params_like = functional(nnx.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        logits, router_logits = apply(params, batch["tokens"], rng, batch["positions"], batch["segments"])
        total, weight = token_batches.loss(logits, batch["labels"])
        balance = load_balancing_loss(router_logits, config.num_experts_per_tok, batch["segments"] != 0)
        return jaxtrain.Loss(total + config.router_aux_loss_coef * balance * weight, weight), {}

    return Case(
        name="mixtral",
        torch_model=lambda: token_batches.torch_model(_hf(config)),
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(config),
        batch=lambda seed, rows: token_batches.padded(seed, rows, TOKENS, config.vocab_size),
        rows=8,
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=1.45,
    )


def _hf(config: MixtralConfig) -> dict[str, Any]:
    # The model as it is written down; its grouped product is unknown to PyTorch's autocast, and runs in float32.
    return {**to_hf(config), "experts_implementation": "eager"}


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    mask = batch["segments"] != 0
    out = model(batch["tokens"], attention_mask=mask, position_ids=batch["positions"])
    total, weight = token_batches.torch_loss(out.logits, batch)
    config: Any = model.config
    balance = load_balancing_loss_func(out.router_logits, config.num_local_experts, config.num_experts_per_tok, mask)
    return total + config.router_aux_loss_coef * balance * weight, weight
