"""Pairs of texts: T5's inputs, and its metric against decoding."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import train_step
from jaxtrain.data import ByteTokenizer
from jaxtrain.errors import UserError
from jaxtrain.models import generate_texts
from jaxtrain.optim import adamw
from jaxtrain.recipes.t5 import T5Recipe

SMALL = T5Recipe(num_layers=1, d_model=16, num_heads=2, eval_pairs=20)


def small(**settings) -> T5Recipe:
    return T5Recipe(**{**vars(SMALL), **settings})


def batch(source, rows: range) -> dict:
    return {name: np.stack([source[i][name] for i in rows]) for name in source[0]}


def test_exact_match_agrees_with_greedy_decoding() -> None:
    """A partially trained model gives both right and wrong examples, and the two agree on each."""
    recipe = small(target_len=13)  # with padding
    task = recipe.task()
    step = train_step(task.loss_fn, adamw(1e-2))
    state = step.init(task.params)
    learned, unseen = batch(task.train, range(8)), range(8, 12)
    for _ in range(60):
        state, metrics = step(state, learned)
    assert metrics["exact_match"] == 1
    texts = ByteTokenizer()
    model = nnx.eval_shape(lambda: recipe.model(texts))
    rows = [task.train[i] for i in (*range(8), *unseen)]
    sources = np.stack([row["source"] for row in rows])
    written = generate_texts(model, state.params, texts, sources, recipe.target_len)
    alone = jax.jit(lambda params, row: task.loss_fn(params, row, None)[1]["exact_match"].total)
    for row, text in zip(rows, written, strict=True):
        matched = alone(state.params, {name: value[None] for name, value in row.items()})
        assert float(matched) == (text == texts.decode(row["target"]))
    assert written[:8] == [texts.decode(row["target"]) for row in rows[:8]]
    assert written[8:] != [texts.decode(row["target"]) for row in rows[8:]]


def test_padding_has_no_weight_and_does_not_change_the_loss() -> None:
    short, long = SMALL.task(), small(source_len=40, target_len=20).task()
    rows = range(3)
    (one, metrics), (other, _) = (
        jax.jit(task.loss_fn)(short.params, batch(task.train, rows), None) for task in (short, long)
    )
    assert float(one.weight) == float(other.weight) == 3 * 11
    np.testing.assert_allclose(one.total, other.total, rtol=1e-5)
    assert metrics["exact_match"].total == 0  # untrained


def test_a_table_is_read_by_its_columns(write_table) -> None:
    path = write_table({"en": [f"n {i}" for i in range(20)], "de": [str(i) for i in range(20)], "id": [0] * 20})
    task = small(data=path, source_column="en", target_column="de").task()
    decode = ByteTokenizer().decode
    pairs = {(decode(task.train[i]["source"]), decode(task.train[i]["target"])) for i in range(len(task.train))}
    assert (len(task.train), len(task.validation)) == (18, 2)
    assert all(source == f"n {target}" for source, target in pairs)
    with pytest.raises(UserError, match="has no column 'source', only en, de, id"):
        small(data=path).task()


def test_a_sample_consists_of_held_out_pairs() -> None:
    task = SMALL.task()
    assert task.sample is not None
    state = train_step(task.loss_fn, optax.sgd(0.0)).init(task.params)
    shown = [line.split(" → ")[0] for line in task.sample(state, 0).splitlines()]
    held_out = {ByteTokenizer().decode(task.validation[i]["source"]) for i in range(len(task.validation))}
    assert len(shown) == 5
    assert set(shown) <= held_out


def test_a_width_that_is_not_divisible_by_the_heads_is_refused() -> None:
    with pytest.raises(UserError, match="d_model 15 is not divisible by num_heads 2"):
        small(d_model=15).task()
