"""Causal language modeling with a Llama."""

import math
from dataclasses import dataclass, replace

from flax import nnx

import jaxtrain as jt
from jaxtrain.fields import Depth, Width
from jaxtrain.models import Llama, LlamaConfig, llama
from jaxtrain.recipes.language import LanguageRecipe


@dataclass(frozen=True, kw_only=True)
class LlamaRecipe(LanguageRecipe):
    """A byte-level Llama on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, a TABLE
    (Parquet, Arrow, a saved dataset), or FOLDERs of tokens that `jaxtrain data tokenize` wrote."""

    num_hidden_layers: Depth = 4
    """Number of transformer blocks."""
    hidden_size: Width = 128
    """Width of the hidden states."""
    intermediate_size: Width = 352
    """Width of the MLP's hidden layer."""
    num_attention_heads: Width = 4
    """Number of query heads."""
    num_key_value_heads: Width = 2
    """Number of key and value heads, each shared by the same number of query heads."""

    def model(self, vocab_size: int) -> Llama:
        """Return the model. Raises `UserError` for sizes that are not divisible."""
        return Llama(self.config(vocab_size), rngs=nnx.Rngs(self.seed))

    def config(self, vocab_size: int) -> LlamaConfig:
        """Return the model's configuration."""
        width, heads = self.hidden_size, self.num_attention_heads
        if width % (2 * heads):
            raise jt.UserError(
                f"hidden_size {width} is not divisible by 2 × num_attention_heads {heads}: change one of them"
            )
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=width // heads,
            max_position_embeddings=self.seq_len,
            tie_word_embeddings=True,
            # 0.02 is meant for a width of 768; narrower models learn faster from a larger standard deviation.
            initializer_range=0.02 * math.sqrt(768 / width),
        )

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        task = super().task()
        assert task.classes is not None
        names = llama.torch_names(self.config(task.classes))
        return replace(task, sharding=llama.SHARDING, names=names)
