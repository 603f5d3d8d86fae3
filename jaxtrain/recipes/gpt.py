"""Causal language modeling with a GPT-2."""

import math
from dataclasses import dataclass, replace

from flax import nnx

import jaxtrain as jt
from jaxtrain.fields import Depth, Rate, Width
from jaxtrain.models import GPT2, GPT2Config, gpt2
from jaxtrain.recipes.language import LanguageRecipe


@dataclass(frozen=True, kw_only=True)
class GPTRecipe(LanguageRecipe):
    """A byte-level GPT-2 on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, a TABLE
    (Parquet, Arrow, a saved dataset), or FOLDERs of tokens that `jaxtrain data tokenize` wrote."""

    n_layer: Depth = 4
    """Number of transformer blocks."""
    n_embd: Width = 128
    """Width of the hidden states."""
    n_head: Width = 4
    """Number of attention heads."""
    dropout: Rate = 0.0
    """Dropout rate of embeddings, attention and residuals."""

    def model(self, vocab_size: int) -> GPT2:
        """Return the model. Raises `UserError` for sizes that are not divisible."""
        config = GPT2Config(
            vocab_size=vocab_size,
            n_positions=self.seq_len,
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            dropout=self.dropout,
            # GPT-2's 0.02 is meant for its width of 768; narrower models learn faster from a larger one.
            initializer_range=0.02 * math.sqrt(768 / self.n_embd),
        )
        return GPT2(config, rngs=nnx.Rngs(self.seed))

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        return replace(super().task(), sharding=gpt2.SHARDING, names=gpt2.torch_names())
