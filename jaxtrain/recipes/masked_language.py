"""Masked language modeling (Devlin et al. 2018): a BERT that predicts masked tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import (
    IndexedSource,
    MappedSource,
    Source,
    Tokenizer,
    encode_row,
    is_table,
    split_columns,
    subsample,
    text_windows,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.fields import Share, Width
from jaxtrain.losses import mask_tokens
from jaxtrain.models import bert, functional
from jaxtrain.recipes.encoder import EncoderRecipe, signature
from jaxtrain.run import row_weights


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageRecipe(EncoderRecipe):
    """A byte-level BERT masked language model on Python's standard library, or on --data: a FILE_OR_FOLDER of text, or
    a TABLE (Parquet, Arrow, a saved dataset)."""

    steps: int = 1500
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 100
    eval_every: int = 100
    seq_len: Width = 32
    """Sequence length in tokens; positions are learned faster on short sequences."""
    masked: Share = 0.15
    """Probability that a token is masked and predicted."""
    eval_sequences: Width = 512
    """Number of validation sequences per evaluation."""

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        texts = tokenizer(self.tokenizer)
        pad, mask = texts.special("pad"), texts.special("mask")
        special = np.array([pad, texts.special("start"), texts.special("end")], np.int32)
        train_rows, validation_rows = self.rows(texts)
        train, validation = IndexedSource(train_rows), IndexedSource(subsample(validation_rows, self.eval_sequences))
        create = partial(self.bert, texts, self.seq_len, num_labels=None)
        model = nnx.eval_shape(create)
        apply, _ = functional(model)

        def mask_batch(batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
            # Evaluation has no key: its mask depends on the example's index alone.
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0) if rng is None else rng, batch["index"])
            mask_row = partial(mask_tokens, mask=mask, vocabulary=texts.size, share=self.masked)
            maskable = jnp.isin(batch["tokens"], special, invert=True)
            return jax.vmap(mask_row)(keys, batch["tokens"], maskable)

        def predict(params: Any, batch: Any, rng: Any) -> jt.Predictions:
            mask_rng, rng = (None, None) if rng is None else jax.random.split(rng)
            tokens = batch["tokens"]
            inputs, predicted = mask_batch(batch, mask_rng)
            weight = jnp.where(predicted, row_weights(batch, len(tokens))[:, None], 0)
            return jt.Predictions(apply(params, inputs, tokens != pad, None, rng), tokens, weight)

        def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
            predictions = predict(params, batch, rng)
            return predictions.loss(), {"accuracy": predictions.accuracy()}

        def sample(state: jt.TrainState, seed: int) -> str:
            example = validation[int(np.random.default_rng(seed).integers(len(validation)))]
            inputs, (predicted,) = mask_batch({name: np.asarray(value)[None] for name, value in example.items()}, None)
            tokens = example["tokens"]
            (filled,) = apply(state.params, inputs, tokens[None] != pad, None, None).argmax(-1)
            shown = ("█" if gap else texts.decode([token]) for token, gap in zip(tokens, predicted, strict=True))
            return f"{''.join(shown)}\n→\n{texts.decode(np.where(predicted, filled, tokens))}"

        targets = np.concatenate([validation[i]["tokens"] for i in range(len(validation))])
        return jt.Task(
            init=jax.jit(lambda: functional(create())[1]),
            loss_fn=loss_fn,
            predict=lambda params, batch, _: predict(params, batch, None),
            signature=signature(model, "tokens"),
            texts=texts,
            train=train,
            validation=validation,
            eval_rows=len(validation),
            classes=texts.size,
            unit="tokens",
            units_per_row=self.seq_len,
            bounds={"index": max(len(train), len(validation))},
            description={
                "text": str(self.data) if self.data else "the source of Python's standard library",
                "sequences": f"{len(train):,} for training, {len(validation):,} for validation",
            },
            references={"unigram entropy": unigram_entropy(targets[targets != pad])},
            sample=sample,
            sharding=bert.SHARDING,
            names=bert.torch_names(model.config),
        )

    def rows(self, texts: Tokenizer) -> tuple[Source, Source]:
        """Return (train, validation): windows over the text of files, or a table's rows, of `seq_len` tokens each."""
        if self.seq_len < 3:
            raise jt.UserError(f"seq_len must be at least 3, got {self.seq_len}: use 3 or more")
        if self.data is None or not is_table(self.data):
            return text_windows(self.data, texts, self.seq_len - 1)
        encode = partial(encode_row, texts, length=self.seq_len)
        rows, validation_rows = split_columns(self.data, {"text": self.text_column})
        return MappedSource(rows, encode), MappedSource(validation_rows, encode)
