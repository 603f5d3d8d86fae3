"""Recipes of causal language models."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """A causal language model."""

    steps: int = 600
    batch_size: int = 16
    lr: float = 4e-3
    seq_len: int = 128
    """Context length in tokens; bytes without a tokenizer."""
    packing: bool = False
    """Pack whole texts into rows, without attention between them, instead of windows; always on for tables."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    text_column: str = "text"
    """Text column, when --data is a table."""
    eval_sequences: int = 128
    """Number of validation sequences per evaluation."""


@dataclass(frozen=True, kw_only=True)
class GPTRecipe(LanguageRecipe):
    """A byte-level GPT-2 on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, or a TABLE
    (Parquet, Arrow, a saved dataset)."""

    n_layer: int = 4
    """Number of transformer blocks."""
    n_embd: int = 128
    """Width of the hidden states."""
    n_head: int = 4
    """Number of attention heads."""
    dropout: float = 0.0
    """Dropout rate of embeddings, attention and residuals."""


@dataclass(frozen=True, kw_only=True)
class LlamaRecipe(LanguageRecipe):
    """A byte-level Llama on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, or a
    TABLE (Parquet, Arrow, a saved dataset)."""

    num_hidden_layers: int = 4
    """Number of transformer blocks."""
    hidden_size: int = 128
    """Width of the hidden states."""
    intermediate_size: int = 352
    """Width of the MLP's hidden layer."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_key_value_heads: int = 2
    """Number of key and value heads, each shared by the same number of query heads."""
