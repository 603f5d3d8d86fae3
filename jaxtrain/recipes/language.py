"""Causal language modeling: a decoder that predicts the next token; tokens are bytes by default."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

import jaxtrain as jt
from jaxtrain.data import (
    Example,
    Mixture,
    Source,
    Tokenizer,
    TokenWindows,
    is_table,
    pack,
    replace_unprintable,
    split_documents,
    subsample,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.data.corpus import corpus_mixtures, named_corpora
from jaxtrain.models import Sampling, functional, stream, stream_text
from jaxtrain.run import Input, Signature, row_weights

BYTES = 256
PROMPT = "def "
SAMPLE_TOKENS = 300
TEMPERATURE = 0.8
_ENTROPY_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(jt.Recipe):
    """A causal language model."""

    data: Path | None = None
    """Path of your own data, instead of the recipe's; or folders of tokens with weights, as "web=0.7,code=0.3"."""
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

    def model(self, vocab_size: int) -> nnx.Module:
        """Return the model, called as `model(tokens, rng, positions, segments)`."""
        raise NotImplementedError

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        texts = tokenizer(self.tokenizer)
        vocab_size = BYTES if self.tokenizer is None else texts.size
        train, validation, entropy = self.rows(texts)
        model = nnx.eval_shape(lambda: self.model(vocab_size))
        apply, _ = functional(model)

        def predict(params: Any, batch: Any, rng: Any) -> jt.Predictions:
            if "segments" in batch:
                inputs, targets = batch["tokens"], batch["targets"]
                real = batch["segments"] > 0
                logits = apply(params, inputs, rng, batch["positions"], batch["segments"])
            else:
                inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
                real = jnp.ones_like(targets, bool)
                logits = apply(params, inputs, rng)
            weight = jnp.where(real, row_weights(batch, len(targets))[:, None], 0)
            return jt.Predictions(logits, targets, weight)

        def sample(state: jt.TrainState, seed: int) -> str:
            prompt = texts.encode(PROMPT).tolist()
            tokens = stream(model, state.params, prompt, SAMPLE_TOKENS, sampling=Sampling(TEMPERATURE), seed=seed)
            return replace_unprintable(texts.decode([*prompt, *tokens]))

        def continue_text(params: Any, prompt: str, *, length: int, temperature: float, seed: int) -> Iterator[str]:
            return stream_text(model, params, texts, prompt, length, sampling=Sampling(temperature), seed=seed)

        return jt.Task(
            init=jax.jit(lambda: functional(self.model(vocab_size))[1]),
            loss_fn=lambda params, batch, rng: (predict(params, batch, rng).loss(), {}),
            predict=lambda params, batch, _: predict(params, batch, None),
            # The padding follows the tokens, which do not attend to it.
            signature=Signature(
                model, {"tokens": Input((self.seq_len,), np.int32, 0)}, lambda call, tokens: call(tokens), "tokens"
            ),
            texts=texts,
            train=train,
            validation=validation,
            eval_rows=min(self.eval_sequences, len(validation)),
            classes=vocab_size,
            unit="tokens",
            units_per_row=self.seq_len,
            bounds={"segments": self.seq_len + 1, "positions": self.seq_len},
            description={
                "text": str(self.data) if self.data else "the source of Python's standard library",
                "rows": f"{_row_counts(train)} for training, {len(validation):,} for validation",
            },
            references={"unigram entropy": entropy},
            sample=sample,
            continue_text=continue_text,
        )

    def rows(self, texts: Tokenizer) -> tuple[Source, Source, float]:
        """Return (train, validation, unigram entropy of the validation tokens): windows over all text, or packed."""
        if corpora := named_corpora(self.data):
            mixtures = corpus_mixtures(corpora, texts, self.seq_len, self.packing)
            return *mixtures, _entropy(mixtures.validation)
        train, validation = split_documents(self.data, texts, self.text_column)
        if not self.packing and (self.data is None or not is_table(self.data)):
            windows = TokenWindows(train.tokens, self.seq_len), TokenWindows(validation.tokens, self.seq_len)
            return *windows, unigram_entropy(validation.tokens)
        packed = subsample(pack(validation, self.seq_len, pad=0), self.eval_sequences)
        return pack(train, self.seq_len, pad=0), packed, _entropy(packed)


def _row_counts(train: Source) -> str:
    """Return the number of rows, or that of each source of a mixture with its share of the batches."""
    if not isinstance(train, Mixture):
        return f"{len(train):,}"
    shares = (count / sum(train.counts) for count in train.counts)
    return " and ".join(
        f"{len(source):,} ({share:.4g})" if share < 1 else f"{len(source):,}"
        for source, share in zip(train.sources, shares, strict=True)
    )


def _entropy(rows: Source) -> float:
    """Return the unigram entropy of the targets in the first rows."""
    examples = [rows[i] for i in range(min(len(rows), _ENTROPY_ROWS))]
    return unigram_entropy(np.concatenate([_targets(example) for example in examples]))


def _targets(row: Example) -> NDArray[np.int32]:
    targets: NDArray[np.int32] = row["targets"][row["segments"] > 0] if "segments" in row else row["tokens"][1:]
    return targets
