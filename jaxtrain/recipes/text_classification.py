"""Text classification with a BERT."""

import sysconfig
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxtrain as jt
from jaxtrain.data import (
    KEYWORDS,
    MappedSource,
    Source,
    bag_of_words_accuracy,
    distinct_labels,
    encode_row,
    python_statements,
    split_columns,
    split_files,
    stdlib_files,
    subsample,
    tokenizer,
)
from jaxtrain.fields import Width
from jaxtrain.models import bert, functional
from jaxtrain.recipes.encoder import EncoderRecipe, signature
from jaxtrain.run import row_weights


@dataclass(frozen=True, kw_only=True)
class TextClassificationRecipe(EncoderRecipe):
    """A BERT that predicts the keyword of a statement of Python's standard library from the rest of its line, or the
    labels of --data TABLE (Parquet, Arrow, a saved dataset)."""

    steps: int = 800
    batch_size: int = 32
    lr: float = 1e-3
    eval_every: int = 100
    seq_len: Width = 62
    """Number of tokens read of a text, without the start and end tokens."""
    label_column: str = "label"
    """Label column, numbers or text, when --data is a table."""
    eval_texts: Width = 1024
    """Number of validation texts per evaluation."""

    def task(self) -> jt.Task:
        """Read the data and build the model."""
        if self.seq_len < 1:
            raise jt.UserError(f"seq_len must be positive, got {self.seq_len}: use 1 or more")
        texts = tokenizer(self.tokenizer)
        pad, length = texts.special("pad"), self.seq_len + 2
        train, validation, classes = self.rows()
        encode = partial(encode_row, texts, length=length, classes=classes)
        create = partial(self.bert, texts, length, num_labels=len(classes))
        model = nnx.eval_shape(create)
        apply, _ = functional(model)

        def predict(params: Any, batch: Any, rng: Any) -> jt.Predictions:
            tokens, labels = batch["tokens"], batch["label"]
            logits = apply(params, tokens, tokens != pad, None, rng)
            return jt.Predictions(logits, labels, row_weights(batch, len(labels)))

        def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
            predictions = predict(params, batch, rng)
            return predictions.loss(), {"accuracy": predictions.accuracy()}

        labels = [validation[i]["label"] for i in range(len(validation))]
        frequencies = np.array([labels.count(c) for c in classes if c in labels]) / len(labels)
        return jt.Task(
            init=jax.jit(lambda: functional(create())[1]),
            loss_fn=loss_fn,
            predict=lambda params, batch, _: predict(params, batch, None),
            signature=signature(model, None),
            class_names=[str(name) for name in classes],
            input_text=lambda example: texts.decode(example["tokens"]),
            train=MappedSource(train, encode),
            validation=MappedSource(validation, encode),
            eval_rows=len(validation),
            classes=len(classes),
            bounds={"tokens": texts.size},
            description={
                "texts": str(self.data) if self.data else "statements of the standard library without their keyword",
                "examples": f"{len(train):,} for training, {len(validation):,} for validation",
                "classes": ", ".join(map(str, classes)),
            },
            baselines=lambda: {
                "accuracy to be beaten": f"{frequencies.max():.3f} by the most frequent class, "
                f"{bag_of_words_accuracy(train, validation):.3f} by naive Bayes over words"
            },
            references={"class entropy": float(frequencies @ np.log(1 / frequencies))},
            sharding=bert.SHARDING,
            names=bert.torch_names(model.config),
        )

    def rows(self) -> tuple[Source, Source, list[Any]]:
        """Return (train, validation, classes), with rows `{"text", "label"}`, whose label is one of the classes."""
        if self.data is None:
            train, validation = python_statements(*split_files(stdlib_files(), sysconfig.get_paths()["stdlib"]))
            return train, subsample(validation, self.eval_texts), list(KEYWORDS)
        rows, validation_rows = split_columns(self.data, {"text": self.text_column, "label": self.label_column})
        # The label column alone: the texts may be large.
        classes = distinct_labels(split_columns(self.data, {"label": self.label_column})[0])
        if len(classes) < 2:
            raise jt.UserError(
                f"{self.data} must have two or more classes in {self.label_column!r}, got 1: add another"
            )
        return rows, subsample(validation_rows, self.eval_texts), classes
