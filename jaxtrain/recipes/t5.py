"""Sequence-to-sequence tasks with a T5 of any size."""

from dataclasses import dataclass

from flax import nnx

import jaxtrain as jt
from jaxtrain.data import Tokenizer
from jaxtrain.fields import Depth, Rate, Width
from jaxtrain.models import T5, T5Config
from jaxtrain.recipes.seq2seq import Seq2SeqRecipe


@dataclass(frozen=True, kw_only=True)
class T5Recipe(Seq2SeqRecipe):
    """A T5 that converts written dates to ISO 8601, or trains on pairs of texts from --data TABLE (Parquet, Arrow, a
    saved dataset)."""

    num_layers: Depth = 2
    """Number of blocks of the encoder, and of the decoder."""
    d_model: Width = 64
    """Width of the hidden states."""
    num_heads: Width = 4
    """Number of attention heads."""
    dropout: Rate = 0.0
    """Dropout rate, at every place where T5 applies dropout."""

    def model(self, texts: Tokenizer) -> T5:
        """Return the model. Raises `UserError` for sizes that are not divisible."""
        if self.d_model % self.num_heads:
            raise jt.UserError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}: change one of them"
            )
        config = T5Config(
            vocab_size=texts.size,
            d_model=self.d_model,
            d_kv=self.d_model // self.num_heads,
            d_ff=4 * self.d_model,
            num_layers=self.num_layers,
            num_decoder_layers=self.num_layers,
            num_heads=self.num_heads,
            dropout=self.dropout,
            pad_token_id=texts.special("pad"),
            eos_token_id=texts.special("end"),
            decoder_start_token_id=texts.special("pad"),
        )
        return T5(config, rngs=nnx.Rngs(self.seed))
