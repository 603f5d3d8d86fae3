"""Causal language modeling: a decoder that predicts the next token; tokens are bytes by default."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import language_rows, replace_unprintable, tokenizer
from jaxtrain.fields import Width
from jaxtrain.models import Sampling, functional, stream, stream_text
from jaxtrain.run import Input, Signature, row_weights

BYTES = 256
PROMPT = "def "
SAMPLE_TOKENS = 300
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(jt.Recipe):
    """A causal language model."""

    data: Path | None = None
    """Path of your own data, instead of the recipe's; or folders of tokens with weights, as "web=0.7,code=0.3"."""
    steps: int = 600
    batch_size: int = 16
    lr: float = 4e-3
    seq_len: Width = 128
    """Context length in tokens; bytes without a tokenizer."""
    packing: bool = False
    """Pack whole texts into rows, without attention between them, instead of windows; always on for tables."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    text_column: str = "text"
    """Text column, when --data is a table."""
    eval_sequences: Width = 128
    """Number of validation sequences per evaluation."""

    def model(self, vocab_size: int) -> nnx.Module:
        """Return the model, called as `model(tokens, rng, positions, segments)`."""
        raise NotImplementedError

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        texts = tokenizer(self.tokenizer)
        vocab_size = BYTES if self.tokenizer is None else texts.size
        rows = language_rows(
            self.data,
            texts,
            self.seq_len,
            packing=self.packing,
            column=self.text_column,
            validation_rows=self.eval_sequences,
        )
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
            train=rows.train,
            validation=rows.validation,
            eval_rows=min(self.eval_sequences, len(rows.validation)),
            classes=vocab_size,
            unit="tokens",
            units_per_row=self.seq_len,
            bounds={"segments": self.seq_len + 1, "positions": self.seq_len},
            description={
                "text": str(self.data) if self.data else "the source of Python's standard library",
                "rows": rows.description,
            },
            references={"unigram entropy": rows.entropy},
            sample=sample,
            sample_prompt=PROMPT,
            continue_text=continue_text,
        )
