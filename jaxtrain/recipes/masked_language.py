"""Bidirectional encoders that learn to fill in what is hidden of a text."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe(Recipe):
    """A BERT."""

    num_hidden_layers: int = 2
    """Blocks."""
    hidden_size: int = 128
    """Width."""
    num_attention_heads: int = 4
    """Attention heads."""
    dropout: float = 0.0
    """Rate, in embeddings, attention and residuals."""
    tokenizer: Path | None = None
    """A tokenizer.json; bytes without one."""
    text_column: str = "text"
    """Of a --data TABLE the column of the texts."""


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageRecipe(EncoderRecipe):
    """A BERT that fills in hidden bytes of Python's standard library, or of --data: a FILE_OR_FOLDER of text, or a
    TABLE (parquet, Arrow, a saved dataset)."""

    steps: int = 1500
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 100
    eval_every: int = 100
    seq_len: int = 32
    """Tokens to a sequence: where each stands is learned sooner of short ones."""
    masked: float = 0.15
    """Share of the tokens to predict."""
    eval_sequences: int = 512
    """Validation sequences to an evaluation."""
