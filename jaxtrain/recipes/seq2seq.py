"""Recipes of encoder-decoder models."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class T5Recipe(Recipe):
    """A T5 that converts written dates to ISO 8601, or trains on pairs of texts from --data TABLE (Parquet, Arrow, a
    saved dataset)."""

    steps: int = 1000
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    eval_every: int = 100
    num_layers: int = 2
    """Number of blocks of the encoder, and of the decoder."""
    d_model: int = 64
    """Width of the hidden states."""
    num_heads: int = 4
    """Number of attention heads."""
    source_len: int = 32
    """Maximum length of a source in tokens, including the end token."""
    target_len: int = 11
    """Maximum length of a target in tokens, including the end token."""
    dropout: float = 0.0
    """Dropout rate, at every place where T5 applies dropout."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    source_column: str = "source"
    """Column of the sources, when --data is a table."""
    target_column: str = "target"
    """Column of the targets, when --data is a table."""
    eval_pairs: int = 1024
    """Number of validation pairs per evaluation."""
