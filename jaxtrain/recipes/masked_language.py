"""Recipes of bidirectional encoders and of masked language modeling."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe(Recipe):
    """A BERT encoder."""

    num_hidden_layers: int = 2
    """Number of transformer blocks."""
    hidden_size: int = 128
    """Width of the hidden states."""
    num_attention_heads: int = 4
    """Number of attention heads."""
    dropout: float = 0.0
    """Dropout rate of embeddings, attention and residuals."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    text_column: str = "text"
    """Text column, when --data is a table."""


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageRecipe(EncoderRecipe):
    """A byte-level BERT masked language model on Python's standard library, or on --data: a FILE_OR_FOLDER of text, or
    a TABLE (Parquet, Arrow, a saved dataset)."""

    steps: int = 1500
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 100
    eval_every: int = 100
    seq_len: int = 32
    """Sequence length in tokens; positions are learned faster on short sequences."""
    masked: float = 0.15
    """Probability that a token is masked and predicted."""
    eval_sequences: int = 512
    """Number of validation sequences per evaluation."""
