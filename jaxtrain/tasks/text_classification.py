"""Text classification: a BERT that says which class a text is of."""

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
from jaxtrain.tasks.masked_language import bert, bert_config, enclosed
from jaxtrain.tasks.task import Predicted, Task, row_weights

_BASELINE_TEXTS = 100_000  # more make a bag of words no better, and take memory


def text_classification_task(recipe: TextClassificationRecipe) -> Task:
    """The task of a `TextClassificationRecipe`."""
    if recipe.seq_len < 1:
        raise UserError(f"seq_len is {recipe.seq_len}: choose 1 or more")
    texts = tokenizer(recipe.tokenizer)
    pad, length = texts.special("pad"), recipe.seq_len + 2
    train, validation, classes = _labelled(recipe)
    encode = partial(encoded, texts, length, classes)
    config = bert_config(recipe, texts, length, num_labels=len(classes))
    apply, init = bert(config, recipe.seed)

    def predict(params: Any, batch: Any, rng: Any) -> Predicted:
        tokens, labels = batch["tokens"], batch["label"]
        logits = apply(params, tokens, tokens != pad, None, rng)
        return Predicted(logits, labels, row_weights(batch, len(labels)))

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        predicted = predict(params, batch, rng)
        return predicted.loss(), {"accuracy": predicted.accuracy()}

    labels = [validation[i]["label"] for i in range(len(validation))]
    frequencies = np.array([labels.count(c) for c in classes if c in labels]) / len(labels)
    return Task(
        init=lambda: (init(), None),
        loss_fn=loss_fn,
        predict=lambda params, batch, _: predict(params, batch, None),
        class_names=[str(name) for name in classes],
        given=lambda example: texts.decode(example["tokens"]),
        train=MappedSource(train, encode),
        validation=MappedSource(validation, encode),
        eval_rows=len(validation),
        classes=len(classes),
        unit="examples",
        units_per_row=1,
        bounds={"tokens": texts.size},
        facts={
            "texts": str(recipe.data) if recipe.data else "statements of the standard library, less their keyword",
            "examples": f"{len(train):,} to train on, {len(validation):,} to validate on",
            "classes": ", ".join(map(str, classes)),
            "accuracy to be beaten": f"{frequencies.max():.3f} by the commonest class, "
            f"{bag_of_words_accuracy(train, validation):.3f} by naive Bayes over words",
        },
        references={"class entropy": float(frequencies @ np.log(1 / frequencies))},
        sharding=SHARDING,
        names=torch_names(config),
    )


def encoded(texts: Tokenizer, length: int, classes: Sequence[Any], row: Example) -> Example:
    """`{"tokens": int32 [length], "label": int32}` of `{"text", "label"}`.

    Raises UserError for a label that is no class.
    """
    if row["label"] not in classes:
        raise UserError(f"the label {row['label']!r} is in the validation split alone: give texts of it to train on")
    return {"tokens": enclosed(texts, row["text"], length), "label": np.int32(classes.index(row["label"]))}


def bag_of_words_accuracy(train: Source, validation: Source) -> float:
    """The accuracy of multinomial naive Bayes over counts of words and of punctuation."""
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


def _labelled(recipe: TextClassificationRecipe) -> tuple[Source, Source, list[Any]]:
    """(train, validation, classes), the rows `{"text": str, "label": one of the classes}`."""
    if recipe.data is None:
        train, validation = python_statements(*split_files(stdlib_files(), sysconfig.get_paths()["stdlib"]))
        return train, subsample(validation, recipe.eval_texts), list(KEYWORDS)
    row = partial(_row, recipe)
    rows, validation_rows = split_table(recipe.data, [recipe.text_column, recipe.label_column])
    # Without the texts: they may be many.
    labels, _ = split_table(recipe.data, [recipe.label_column])
    classes = sorted({_plain(labels[i][recipe.label_column]) for i in range(len(labels))})
    if len(classes) < 2:
        raise UserError(f"{recipe.data} has one class in {recipe.label_column!r}: give two or more")
    return MappedSource(rows, row), MappedSource(subsample(validation_rows, recipe.eval_texts), row), classes


def _row(recipe: TextClassificationRecipe, row: Example) -> Example:
    return {"text": str(row[recipe.text_column]), "label": _plain(row[recipe.label_column])}


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label
