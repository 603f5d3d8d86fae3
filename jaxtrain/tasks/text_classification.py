"""Text classification with a BERT."""

import sysconfig
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.data import (
    KEYWORDS,
    Example,
    MappedSource,
    Source,
    Tokenizer,
    python_statements,
    split_files,
    split_table,
    stdlib_files,
    subsample,
    tokenizer,
)
from jaxtrain.errors import UserError
from jaxtrain.models.bert import SHARDING, torch_names
from jaxtrain.recipes import TextClassificationRecipe
from jaxtrain.step import Loss
from jaxtrain.tasks.masked_language import bert, bert_config, encode_text
from jaxtrain.tasks.task import Predictions, Task, row_weights

_BASELINE_TEXTS = 100_000  # enough for naive Bayes; bounds its memory


def text_classification_task(recipe: TextClassificationRecipe) -> Task:
    """Return the task of a `TextClassificationRecipe`."""
    if recipe.seq_len < 1:
        raise UserError(f"seq_len must be positive, got {recipe.seq_len}: use 1 or more")
    texts = tokenizer(recipe.tokenizer)
    pad, length = texts.special("pad"), recipe.seq_len + 2
    train, validation, classes = _labeled_rows(recipe)
    encode = partial(encode_row, texts, length, classes)
    config = bert_config(recipe, texts, length, num_labels=len(classes))
    apply, init = bert(config, recipe.seed)

    def predict(params: Any, batch: Any, rng: Any) -> Predictions:
        tokens, labels = batch["tokens"], batch["label"]
        logits = apply(params, tokens, tokens != pad, None, rng)
        return Predictions(logits, labels, row_weights(batch, len(labels)))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        predictions = predict(params, batch, rng)
        return predictions.loss(), {"accuracy": predictions.accuracy()}

    labels = [validation[i]["label"] for i in range(len(validation))]
    frequencies = np.array([labels.count(c) for c in classes if c in labels]) / len(labels)
    return Task(
        init=lambda: (init(), None),
        loss_fn=loss_fn,
        predict=lambda params, batch, _: predict(params, batch, None),
        class_names=[str(name) for name in classes],
        input_text=lambda example: texts.decode(example["tokens"]),
        train=MappedSource(train, encode),
        validation=MappedSource(validation, encode),
        eval_rows=len(validation),
        classes=len(classes),
        unit="examples",
        units_per_row=1,
        bounds={"tokens": texts.size},
        description={
            "texts": str(recipe.data) if recipe.data else "statements of the standard library without their keyword",
            "examples": f"{len(train):,} for training, {len(validation):,} for validation",
            "classes": ", ".join(map(str, classes)),
        },
        baselines=lambda: {
            "accuracy to be beaten": f"{frequencies.max():.3f} by the most frequent class, "
            f"{bag_of_words_accuracy(train, validation):.3f} by naive Bayes over words"
        },
        references={"class entropy": float(frequencies @ np.log(1 / frequencies))},
        sharding=SHARDING,
        names=torch_names(config),
    )


def encode_row(texts: Tokenizer, length: int, classes: Sequence[Any], row: Example) -> Example:
    """Encode `{"text", "label"}` as `{"tokens": int32 [length], "label": int32}`.

    Raises `UserError` for a label that is not a class.
    """
    if row["label"] not in classes:
        raise UserError(f"label {row['label']!r} occurs only in the validation split: add training texts with it")
    return {"tokens": encode_text(texts, row["text"], length), "label": np.int32(classes.index(row["label"]))}


def bag_of_words_accuracy(train: Source, validation: Source) -> float:
    """Return the accuracy of multinomial naive Bayes over counts of words and punctuation."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    def columns(source: Source) -> tuple[list[str], list[str]]:
        rows = [source[i] for i in range(len(source))]
        return [row["text"] for row in rows], [str(row["label"]) for row in rows]

    words = CountVectorizer(token_pattern=r"\w+|[^\w\s]")
    texts, labels = columns(subsample(train, _BASELINE_TEXTS))
    bayes = MultinomialNB().fit(words.fit_transform(texts), labels)
    texts, labels = columns(validation)
    return float(bayes.score(words.transform(texts), labels))


def _labeled_rows(recipe: TextClassificationRecipe) -> tuple[Source, Source, list[Any]]:
    """Return (train, validation, classes), with rows `{"text": str, "label": one of the classes}`."""
    if recipe.data is None:
        train, validation = python_statements(*split_files(stdlib_files(), sysconfig.get_paths()["stdlib"]))
        return train, subsample(validation, recipe.eval_texts), list(KEYWORDS)
    row = partial(_row, recipe)
    rows, validation_rows = split_table(recipe.data, [recipe.text_column, recipe.label_column])
    # The label column alone: the texts may be large.
    labels, _ = split_table(recipe.data, [recipe.label_column])
    classes = sorted({_plain(labels[i][recipe.label_column]) for i in range(len(labels))})
    if len(classes) < 2:
        raise UserError(f"{recipe.data} must have two or more classes in {recipe.label_column!r}, got 1: add another")
    return MappedSource(rows, row), MappedSource(subsample(validation_rows, recipe.eval_texts), row), classes


def _row(recipe: TextClassificationRecipe, row: Example) -> Example:
    return {"text": str(row[recipe.text_column]), "label": _plain(row[recipe.label_column])}


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label
