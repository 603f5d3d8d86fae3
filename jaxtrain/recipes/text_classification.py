"""Recipes of text classifiers."""

from dataclasses import dataclass

from jaxtrain.recipes.masked_language import EncoderRecipe


@dataclass(frozen=True, kw_only=True)
class TextClassificationRecipe(EncoderRecipe):
    """A BERT that predicts the keyword of a statement of Python's standard library from the rest of its line, or the
    labels of --data TABLE (Parquet, Arrow, a saved dataset)."""

    steps: int = 800
    batch_size: int = 32
    lr: float = 1e-3
    eval_every: int = 100
    seq_len: int = 62
    """Number of tokens read of a text, without the start and end tokens."""
    label_column: str = "label"
    """Label column, numbers or text, when --data is a table."""
    eval_texts: int = 1024
    """Number of validation texts per evaluation."""
