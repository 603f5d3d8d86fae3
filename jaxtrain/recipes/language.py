"""Byte-level language models."""

from dataclasses import dataclass

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class GPTRecipe(Recipe):
    """A byte-level GPT on the source of Python's standard library, or on --data FILE_OR_FOLDER of text."""

    steps: int = 600
    batch_size: int = 16
    lr: float = 4e-3
    n_layer: int = 4
    """Blocks."""
    n_embd: int = 128
    """Width."""
    n_head: int = 4
    """Attention heads."""
    seq_len: int = 128
    """Bytes of context."""
    dropout: float = 0.0
    """Rate, in embeddings, attention and residuals."""
    eval_sequences: int = 128
    """Validation sequences to an evaluation."""
