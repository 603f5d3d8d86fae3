"""The settings and the model of runs that train a BERT."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import Tokenizer
from jaxtrain.fields import Depth, Rate, Width
from jaxtrain.models import Bert, BertConfig
from jaxtrain.run import Input, Signature


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe(jt.Recipe):
    """A BERT encoder."""

    data: Path | None = None
    """Path of your own data, instead of the recipe's."""
    num_hidden_layers: Depth = 2
    """Number of transformer blocks."""
    hidden_size: Width = 128
    """Width of the hidden states."""
    num_attention_heads: Width = 4
    """Number of attention heads."""
    dropout: Rate = 0.0
    """Dropout rate of embeddings, attention and residuals."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    text_column: str = "text"
    """Text column, when --data is a table."""

    def bert(self, texts: Tokenizer, length: int, *, num_labels: int | None) -> Bert:
        """Return a masked language model or, with `num_labels`, a classifier of rows of `length` tokens.

        Raises `UserError` for sizes that are not divisible.
        """
        config = BertConfig(
            vocab_size=texts.size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=4 * self.hidden_size,
            max_position_embeddings=length,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            # BERT's 0.02 is meant for its width of 768; narrower models learn faster from a larger standard deviation.
            initializer_range=0.02 * math.sqrt(768 / self.hidden_size),
            pad_token_id=texts.special("pad"),
            num_labels=num_labels,
        )
        return Bert(config, rngs=nnx.Rngs(self.seed))


def signature(model: Bert, length_input: str | None) -> Signature:
    """Return the signature of a model of padded tokens; `length_input` is that of `Signature`."""
    pad, length = model.config.pad_token_id, model.config.max_position_embeddings
    inputs = {"tokens": Input((length,), np.int32, pad)}
    return Signature(model, inputs, lambda call, tokens: call(tokens, tokens != pad), length_input)
