"""Parts of models: rotary frequencies, padding rows of tied embeddings, defaults of configurations."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, nn

from jaxtrain.models import ViTConfig
from tests.parity.mutants.layer_functions import layer_norm
from tests.parity.mutants.layers import mutants, tokens
from tests.parity.mutants.network import Call, normal

LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Of four frequencies the first is above the bounds, the second between and the others below them."""


def tiny(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw inputs whose variance is that of the smallest default epsilon."""
    return normal(rng, shape) * np.float32(1e-6)


def rotated(x: Tensor) -> Tensor:
    """Rotate one head [B, T, 8] as `transformers`' Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=8, num_attention_heads=1, rope_parameters=LLAMA3)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1])[None])
    rotated: Tensor = apply_rotary_pos_emb(x[:, None], x[:, None], cos, sin)[0][:, 0]
    return rotated


def rotary(p: Any, x: Any, swapped: bool = False) -> Any:
    """Rotate one head [B, T, 8]."""
    plain = LLAMA3["rope_theta"] ** -(np.arange(0, 8, 2) / 8)
    rotations = LLAMA3["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    weight = np.clip((high - rotations if swapped else rotations - low) / (high - low), 0, 1)
    weight = np.where(rotations < low, 0, np.where(rotations > high, 1, weight))
    angles = np.arange(x.shape[1])[:, None] * (weight + (1 - weight) / LLAMA3["factor"]) * plain
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Tied(nn.Module):
    """An embedding with a padding row, which is the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score of each row of the embedding."""
        return ((self.embedding(x).mean(1)[:, None] + 1) * self.embedding.weight).sum(-1)


def tied(p: Any, x: Any, trained: bool = False, frozen: bool = False) -> Any:
    """JAX's `Tied`."""
    weight = p["embedding.weight"]
    fixed = jnp.where(np.arange(3)[:, None] == 0, lax.stop_gradient(weight), weight)
    y = (weight if trained else fixed)[x].mean(1)
    output = fixed if frozen else weight
    return ((y[:, None] + 1) * output).sum(-1)


def default_layer_norm() -> nn.Module:
    """Return the layer normalization of `transformers`' ViT, with the default epsilon."""
    from transformers import ViTConfig as HFConfig

    return nn.LayerNorm(5, eps=HFConfig().layer_norm_eps)


MUTANTS = [
    *mutants(
        lambda: Call(rotated),
        rotary,
        (3, 8),
        rope_smooth_band_ends_swapped=partial(rotary, swapped=True),
    ),
    *mutants(
        Tied,
        tied,
        (3,),
        tokens,
        tied_padding_row_trained_as_an_input=partial(tied, trained=True),
        tied_padding_row_frozen_as_an_output=partial(tied, frozen=True),
    ),
    *mutants(
        default_layer_norm,
        partial(layer_norm, eps=ViTConfig.layer_norm_eps),
        (5,),
        tiny,
        vit_default_eps_tenfold=partial(layer_norm, eps=10 * ViTConfig.layer_norm_eps),
    ),
]
