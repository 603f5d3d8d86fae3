"""Sequence-to-sequence tasks: a T5 that generates the target of each source."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import (
    MappedSource,
    Source,
    Tokenizer,
    dates,
    encode_pair,
    split_columns,
    subsample,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.fields import Width
from jaxtrain.models import T5, functional, generate_texts, t5
from jaxtrain.run import Input, Signature, row_weights


@dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(jt.Recipe):
    """A T5 on pairs of texts."""

    data: Path | None = None
    """Path of your own data, instead of the recipe's."""
    steps: int = 1000
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    eval_every: int = 100
    source_len: Width = 32
    """Maximum length of a source in tokens, including the end token."""
    target_len: Width = 11
    """Maximum length of a target in tokens, including the end token."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json; without one, tokens are bytes."""
    source_column: str = "source"
    """Column of the sources, when --data is a table."""
    target_column: str = "target"
    """Column of the targets, when --data is a table."""
    eval_pairs: Width = 1024
    """Number of validation pairs per evaluation."""

    def model(self, texts: Tokenizer) -> T5:
        """Return the model."""
        raise NotImplementedError

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        texts = tokenizer(self.tokenizer)
        columns = {"source": self.source_column, "target": self.target_column}
        parts: tuple[Source, Source] = dates() if self.data is None else split_columns(self.data, columns)
        train_pairs, pairs = parts[0], subsample(parts[1], self.eval_pairs)
        encode = partial(encode_pair, texts, source_len=self.source_len, target_len=self.target_len)
        train, validation = MappedSource(train_pairs, encode), MappedSource(pairs, encode)
        model = nnx.eval_shape(lambda: self.model(texts))
        config, (apply, _) = model.config, functional(model)
        pad = config.pad_token_id

        def predict(params: Any, batch: Any, rng: Any) -> jt.Predictions:
            source, target = batch["source"], batch["target"]
            logits = apply(params, source, t5.shift_right(target, config), source != pad, None, rng)
            weight = jnp.where(target != pad, row_weights(batch, len(target))[:, None], 0)
            return jt.Predictions(logits, target, weight)

        def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
            predictions, target = predict(params, batch, rng), batch["target"]
            rows = row_weights(batch, len(target))
            right = (predictions.logits.argmax(-1) == target) | (target == pad)
            # Greedy decoding generates the target if and only if every token is right given the right ones before it.
            exact = jt.Loss(jnp.where(right.all(-1), rows, 0).sum(), rows.sum())
            return predictions.loss(), {"exact_match": exact}

        def sample(state: jt.TrainState, seed: int) -> str:
            chosen = [int(i) for i in np.random.default_rng(seed).permutation(len(pairs))[:5]]
            sources = np.stack([validation[i]["source"] for i in chosen])
            targets = generate_texts(model, state.params, texts, sources, self.target_len)
            return "\n".join(f"{pairs[i]['source']!s} → {target}" for i, target in zip(chosen, targets, strict=True))

        targets = np.concatenate([validation[i]["target"] for i in range(len(validation))])
        return jt.Task(
            init=jax.jit(lambda: functional(self.model(texts))[1]),
            loss_fn=loss_fn,
            predict=lambda params, batch, _: predict(params, batch, None),
            signature=Signature(
                model,
                {
                    "source": Input((self.source_len,), np.int32, pad, "source_length"),
                    "target": Input((self.target_len,), np.int32, pad, "target_length"),
                },
                lambda call, source, target: call(source, t5.shift_right(target, config), source != pad),
                "target",
            ),
            texts=texts,
            input_text=lambda example: texts.decode(example["source"]),
            train=train,
            validation=validation,
            eval_rows=len(validation),
            classes=texts.size,
            description={
                "pairs": str(self.data) if self.data else "written dates and their ISO 8601 form",
                "examples": f"{len(train):,} for training, {len(validation):,} for validation",
            },
            references={"unigram entropy": unigram_entropy(targets[targets != pad])},
            sample=sample,
            sharding=t5.SHARDING,
            names=t5.torch_names(config),
        )
