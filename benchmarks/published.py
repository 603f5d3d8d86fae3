"""Recipes of published sizes, to plan without data: `jaxtrain plan benchmarks/published.py::Llama8B`.

Sizes are those of the `config.json` of meta-llama/Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B, and of
mistralai/Mixtral-8x7B-v0.1. All tokens are 0.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.models import Llama, LlamaConfig, Mixtral, MixtralConfig, functional, llama, mixtral
from jaxtrain.run import Precision


@dataclass(frozen=True, kw_only=True)
class Published(jt.Recipe):
    """A decoder of published sizes."""

    batch_size: int = 512
    precision: Precision = "bf16_compute"
    seq_len: int = 8192
    """Tokens of a row."""
    num_hidden_layers: int = 32
    """Number of layers."""

    def model(self) -> nnx.Module:
        """Return the model."""
        raise NotImplementedError

    def task(self) -> jt.Task:
        """Return a task of rows of zeros."""
        apply, _ = functional(nnx.eval_shape(self.model))

        def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jt.Loss, dict[str, Any]]:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            return jt.Predictions(apply(params, inputs, rng), targets, jnp.ones(targets.shape)).loss(), {}

        return jt.Task(
            init=lambda: functional(self.model())[1],
            loss_fn=loss_fn,
            train={"tokens": np.zeros((1, self.seq_len + 1), np.int32)},
            sharding=self.rules,
            unit="tokens",
            units_per_row=self.seq_len,
        )

    @property
    def rules(self) -> Any:
        """The sharding rules of the model."""
        return llama.SHARDING


@dataclass(frozen=True, kw_only=True)
class Llama1B(Published):
    """Llama 3.2 1B."""

    num_hidden_layers: int = 16
    """Number of layers."""

    def model(self) -> nnx.Module:
        """Return the model."""
        return Llama(_llama(self, 2048, 8192, heads=32, head_dim=64, tied=True), rngs=nnx.Rngs(0))


@dataclass(frozen=True, kw_only=True)
class Llama8B(Published):
    """Llama 3.1 8B."""

    def model(self) -> nnx.Module:
        """Return the model."""
        return Llama(_llama(self, 4096, 14336, heads=32, head_dim=128), rngs=nnx.Rngs(0))


@dataclass(frozen=True, kw_only=True)
class Llama70B(Published):
    """Llama 3.1 70B."""

    num_hidden_layers: int = 80
    """Number of layers."""

    def model(self) -> nnx.Module:
        """Return the model."""
        return Llama(_llama(self, 8192, 28672, heads=64, head_dim=128), rngs=nnx.Rngs(0))


@dataclass(frozen=True, kw_only=True)
class Mixtral8x7B(Published):
    """Mixtral 8x7B."""

    def model(self) -> nnx.Module:
        """Return the model."""
        config = MixtralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=max(32768, self.seq_len),
        )
        return Mixtral(config, rngs=nnx.Rngs(0))

    @property
    def rules(self) -> Any:
        """The sharding rules of the model."""
        return mixtral.SHARDING


def _llama(recipe: Published, width: int, hidden: int, *, heads: int, head_dim: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        max_position_embeddings=recipe.seq_len,
        tie_word_embeddings=tied,
    )
