"""Bidirectional encoders that say which class a text is of."""

from dataclasses import dataclass

from jaxtrain.recipes.masked_language import EncoderRecipe


@dataclass(frozen=True, kw_only=True)
class TextClassificationRecipe(EncoderRecipe):
    """A BERT that tells with which keyword a statement of Python's standard library begins from the rest of its line;
    or that learns the labels of --data TABLE (parquet, Arrow, a saved dataset)."""

    steps: int = 800
    batch_size: int = 32
    lr: float = 1e-3
    eval_every: int = 100
    seq_len: int = 62
    """Tokens of a text that are read, with one before it and one behind."""
    label_column: str = "label"
    """Of a --data TABLE the column of the labels, numbers or text."""
    eval_texts: int = 1024
    """Validation texts to an evaluation."""
