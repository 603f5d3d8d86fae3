"""Texts and their classes, from tables and from Python's standard library."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.cli import main
from jaxtrain.data import ByteTokenizer
from jaxtrain.data.text.python_statements import KEYWORDS, Statements
from jaxtrain.errors import UserError
from jaxtrain.recipes import text_classification
from jaxtrain.recipes.text_classification import TextClassificationRecipe

SMALL = TextClassificationRecipe(
    num_hidden_layers=1, hidden_size=8, num_attention_heads=2, seq_len=14, eval_texts=6, text_column="body"
)


def recipe(path: Path | None, **settings) -> TextClassificationRecipe:
    return TextClassificationRecipe(**{**vars(SMALL), "data": path, **settings})


@pytest.mark.parametrize("labels", [["neg", "pos"], [3, 7]])
def test_a_table_is_read_by_its_columns_and_its_labels_numbered_in_order(write_table, labels: list) -> None:
    path = write_table(
        {"body": [f"text {i}" for i in range(40)], "label": [labels[i % 2] for i in range(40)], "id": [0] * 40}
    )
    task = recipe(path).task()
    assert (task.classes, len(task.train), len(task.validation), task.eval_rows) == (2, 36, 4, 4)
    for i in range(len(task.train)):
        example = task.train[i]
        number = int(ByteTokenizer().decode(example["tokens"]).removeprefix("text "))
        assert example["label"] == number % 2
    loss, metrics = task.loss_fn(task.params, batch(task.train, 8), None)
    assert float(loss.weight) == 8
    assert abs(float(loss.total) / 8 - np.log(2)) < 0.3
    assert float(metrics["accuracy"].weight) == 8
    assert dict(task.bounds) == {"tokens": 260}


def batch(source, count: int) -> dict:
    return {name: np.stack([source[i][name] for i in range(count)]) for name in source[0]}


def test_padding_does_not_change_predictions(write_table) -> None:
    path = write_table({"body": [f"text {i}" for i in range(40)], "label": [i % 2 for i in range(40)]})
    losses = [
        float(task.loss_fn(task.params, batch(task.train, 8), None)[0].total)
        for task in (
            recipe(path, seq_len=14).task(),
            recipe(path, seq_len=8).task(),
        )
    ]
    # The numbers of position embeddings differ, and so do their initial values: use the same parameters for both.
    long, short = recipe(path, seq_len=14).task(), recipe(path, seq_len=8).task()
    params = jax.tree.map(lambda x: x, long.params)
    params["embeddings"]["position"] = params["embeddings"]["position"][:10]
    with_long = long.loss_fn(long.params, batch(long.train, 8), None)[0].total
    np.testing.assert_allclose(short.loss_fn(params, batch(short.train, 8), None)[0].total, with_long, rtol=1e-5)
    assert np.isfinite(losses).all()


def test_the_standard_library_is_read_if_no_data_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Statements((("if", "x is None: pass"), ("for", "line in lines:")) * 20)
    monkeypatch.setattr(text_classification, "python_statements", lambda *files: (train, Statements(train.lines[:8])))
    task = recipe(None).task()
    assert task.classes == len(KEYWORDS)
    assert task.train[1]["label"] == KEYWORDS.index("for")
    assert task.baselines() == {
        "accuracy to be beaten": "0.500 by the most frequent class, 1.000 by naive Bayes over words"
    }
    assert task.references["class entropy"] == pytest.approx(np.log(2))


def test_the_baseline_is_fitted_only_where_it_is_reported(write_table, monkeypatch, tmp_path) -> None:
    path = write_table({"body": ["bad", "good"] * 20, "label": ["no", "yes"] * 20})
    fits = []
    monkeypatch.setattr(text_classification, "bag_of_words_accuracy", lambda *sources: fits.append(sources) or 0.5)
    recipe(path).task()
    assert fits == []
    monkeypatch.chdir(tmp_path)
    sizes = "--num-hidden-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-len 14 --batch-size 8"
    train = f"train bert-keywords --data {path} --text-column body {sizes} --out run".split()
    assert main([*train, "--steps", "1"]) == 0
    assert len(fits) == 1
    assert main([*train, "--steps", "2", "--resume"]) == 0
    assert len(fits) == 1


def test_invalid_classes_are_named(write_table) -> None:
    path = write_table({"body": ["text"] * 9, "label": [1] * 9})
    with pytest.raises(UserError, match="must have two or more classes in 'label', got 1"):
        recipe(path).task()
    with pytest.raises(UserError, match="has no column 'kind', only body, label"):
        recipe(path, label_column="kind").task()
    with pytest.raises(UserError, match="seq_len must be positive, got 0"):
        recipe(path, seq_len=0).task()
