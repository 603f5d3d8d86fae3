"""Encoder-decoder models, from one text to another."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class T5Recipe(Recipe):
    """A T5 that reads dates as people write them, or pairs of texts from --data TABLE (parquet, Arrow, a saved
    dataset)."""

    steps: int = 1000
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    eval_every: int = 100
    num_layers: int = 2
    """Blocks of the encoder, and of the decoder."""
    d_model: int = 64
    """Width."""
    num_heads: int = 4
    """Attention heads."""
    source_len: int = 32
    """Most tokens of a source, with the one that ends it."""
    target_len: int = 11
    """Most tokens of a target, with the one that ends it."""
    dropout: float = 0.0
    """Rate, everywhere T5 has one."""
    tokenizer: Path | None = None
    """A tokenizer.json; bytes without one."""
    source_column: str = "source"
    """The column of the table to read from."""
    target_column: str = "target"
    """The column to write."""
    eval_pairs: int = 1024
    """Validation pairs to an evaluation."""
