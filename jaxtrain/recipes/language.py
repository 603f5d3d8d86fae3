"""Language models."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """A model of the next token."""

    steps: int = 600
    batch_size: int = 16
    lr: float = 4e-3
    seq_len: int = 128
    """Bytes, or tokens, of context."""
    packing: bool = False
    """Rows of whole texts that do not see each other, in place of windows over all text; of a table's rows always."""
    tokenizer: Path | None = None
    """A tokenizer.json; bytes without one."""
    text_column: str = "text"
    """Of a --data TABLE the column of the texts."""
    eval_sequences: int = 128
    """Validation sequences to an evaluation."""


@dataclass(frozen=True, kw_only=True)
class GPTRecipe(LanguageRecipe):
    """A byte-level GPT on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, or a TABLE
    (parquet, Arrow, a saved dataset)."""

    n_layer: int = 4
    """Blocks."""
    n_embd: int = 128
    """Width."""
    n_head: int = 4
    """Attention heads."""
    dropout: float = 0.0
    """Rate, in embeddings, attention and residuals."""


@dataclass(frozen=True, kw_only=True)
class LlamaRecipe(LanguageRecipe):
    """A byte-level Llama on the source of Python's standard library, or on --data: a FILE_OR_FOLDER of text, or a
    TABLE (parquet, Arrow, a saved dataset)."""

    num_hidden_layers: int = 4
    """Blocks."""
    hidden_size: int = 128
    """Width."""
    intermediate_size: int = 352
    """Width of the MLP's hidden layer."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 2
    """Heads of keys and values, each shared by as many queries."""
