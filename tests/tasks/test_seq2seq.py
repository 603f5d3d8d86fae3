"""Pairs of texts: T5's inputs, and its metric against decoding."""

import jax
import numpy as np
import pytest

from jaxtrain import train_step
from jaxtrain.data import ByteTokenizer
from jaxtrain.errors import UserError
from jaxtrain.optim import adamw
from jaxtrain.recipes.seq2seq import T5Recipe
from jaxtrain.tasks.seq2seq import encode_pair, seq2seq_task, t5, translate

SMALL = T5Recipe(num_layers=1, d_model=16, num_heads=2, eval_pairs=20)
PAD, END = ByteTokenizer().special("pad"), ByteTokenizer().special("end")


def small(**settings) -> T5Recipe:
    return T5Recipe(**{**vars(SMALL), **settings})


def batch(source, rows: range) -> dict:
    return {name: np.stack([source[i][name] for i in rows]) for name in source[0]}


def test_pairs_are_ended_then_padded_and_not_cut() -> None:
    recipe = small(source_len=5, target_len=4)
    pair = encode_pair(recipe, ByteTokenizer(), {"source": "abc", "target": "xyz"})
    assert pair["source"].tolist() == [97, 98, 99, END, PAD]
    assert pair["target"].tolist() == [120, 121, 122, END]
    with pytest.raises(UserError, match="the target 'wxyz' has 5 tokens with its end token, more than target_len 4"):
        encode_pair(recipe, ByteTokenizer(), {"source": "a", "target": "wxyz"})


@pytest.mark.slow
def test_exact_match_is_what_greedy_decoding_matches() -> None:
    """With a half-trained model, both agree on each example, right or wrong."""
    recipe = small(target_len=13)  # with padding
    task = seq2seq_task(recipe)
    step = train_step(task.loss_fn, adamw(1e-2))
    state = step.init(task.params)
    learned, unseen = batch(task.train, range(8)), range(8, 12)
    for _ in range(60):
        state, metrics = step(state, learned)
    assert metrics["exact_match"] == 1
    texts = ByteTokenizer()
    model, _ = t5(recipe, texts)
    rows = [task.train[i] for i in (*range(8), *unseen)]
    sources = [texts.decode(row["source"]) for row in rows]
    written = translate(recipe, texts, model, state.params, sources)
    alone = jax.jit(lambda params, row: task.loss_fn(params, row, None)[1]["exact_match"].total)
    for row, text in zip(rows, written, strict=True):
        matched = alone(state.params, {name: value[None] for name, value in row.items()})
        assert float(matched) == (text == texts.decode(row["target"]))
    assert written[:8] == [texts.decode(row["target"]) for row in rows[:8]]
    assert written[8:] != [texts.decode(row["target"]) for row in rows[8:]]


@pytest.mark.slow
def test_padding_weighs_and_changes_nothing() -> None:
    short, long = seq2seq_task(SMALL), seq2seq_task(small(source_len=40, target_len=20))
    rows = range(3)
    one, other = (jax.jit(task.loss_fn)(short.params, batch(task.train, rows), None)[0] for task in (short, long))
    assert float(one.weight) == float(other.weight) == 3 * 11
    np.testing.assert_allclose(one.total, other.total, rtol=1e-5)


def test_a_table_is_read_by_its_columns(write_table) -> None:
    path = write_table({"en": [f"n {i}" for i in range(20)], "de": [str(i) for i in range(20)], "id": [0] * 20})
    task = seq2seq_task(small(data=path, source_column="en", target_column="de"))
    decode = ByteTokenizer().decode
    pairs = {(decode(task.train[i]["source"]), decode(task.train[i]["target"])) for i in range(len(task.train))}
    assert (len(task.train), len(task.validation)) == (18, 2)
    assert all(source == f"n {target}" for source, target in pairs)
    with pytest.raises(UserError, match="has no column 'source', only en, de, id"):
        seq2seq_task(small(data=path))


@pytest.mark.slow
def test_a_sample_is_of_held_out_pairs() -> None:
    task = seq2seq_task(SMALL)
    assert task.sample is not None
    shown = [line.split(" → ")[0] for line in task.sample(task.params, 0).splitlines()]
    held_out = {ByteTokenizer().decode(task.validation[i]["source"]) for i in range(len(task.validation))}
    assert len(shown) == 5
    assert set(shown) <= held_out


def test_a_width_the_heads_do_not_divide_is_named() -> None:
    with pytest.raises(UserError, match="d_model 15 is not divisible by num_heads 2"):
        seq2seq_task(small(d_model=15))
