"""Inputs and targets of a masked language model."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import train_step
from jaxtrain.data import ByteTokenizer
from jaxtrain.data.loader import epoch_batches
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy, mask_tokens
from jaxtrain.models import functional
from jaxtrain.recipes.masked_language import MaskedLanguageRecipe
from jaxtrain.run import Task

PAD, START, MASK = (ByteTokenizer().special(role) for role in ("pad", "start", "mask"))
SMALL = MaskedLanguageRecipe(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, seq_len=16, eval_sequences=7)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 20)
    return MaskedLanguageRecipe(**{**vars(SMALL), "data": tmp_path}).task()


def test_the_evaluation_mask_does_not_depend_on_the_batch(task: Task) -> None:
    evaluate, totals = jax.jit(task.loss_fn), {}
    for rows in (2, 3, 7):
        losses = [evaluate(task.params, batch, None)[0] for batch in epoch_batches(task.validation, rows)]
        totals[rows] = np.sum(jax.device_get(losses), axis=0)
    assert totals[2] == pytest.approx(totals[7], rel=1e-5)
    assert totals[3] == pytest.approx(totals[7], rel=1e-5)
    assert 0.05 < totals[7][1] / (7 * 16) < 0.3  # the weight counts the masked tokens


def test_training_masks_differently_with_every_key(task: Task) -> None:
    batch = {name: np.stack([task.train[i][name] for i in range(4)]) for name in ("tokens", "index")}
    losses = [float(task.loss_fn(task.params, batch, jax.random.key(seed))[0].total) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_the_loss_is_the_sum_over_the_predicted_tokens(task: Task) -> None:
    """Compare with a direct call of the model in evaluation, where the mask depends on the example's index."""
    example = task.validation[4]
    batch = {name: np.asarray(value)[None] for name, value in example.items()}
    loss, metrics = task.loss_fn(task.params, batch, None)
    hide = partial(mask_tokens, mask=MASK, vocabulary=260, share=SMALL.masked)
    seen, predicted = hide(jax.random.fold_in(jax.random.key(0), 4), jnp.asarray(example["tokens"]), jnp.ones(16, bool))
    apply, _ = functional(nnx.eval_shape(lambda: SMALL.bert(ByteTokenizer(), 16, num_labels=None)))
    logits = apply(task.params, seen[None], jnp.ones((1, 16), bool))[0]
    losses = cross_entropy(logits, jnp.asarray(example["tokens"]))
    assert int(loss.weight) == int(predicted.sum()) > 0
    np.testing.assert_allclose(loss.total, losses[predicted].sum(), rtol=1e-5)
    right = logits.argmax(-1) == example["tokens"]
    assert int(metrics["accuracy"].total) == int(right[predicted].sum())


def test_rows_of_a_table_are_enclosed_and_padded(write_table) -> None:
    path = write_table({"body": [f"text {i}" for i in range(20)]})
    settings = {**vars(SMALL), "data": path, "text_column": "body", "masked": 0.99}
    task = MaskedLanguageRecipe(**settings).task()
    tokens = task.train[0]["tokens"]
    assert tokens[0] == START
    assert ByteTokenizer().decode(tokens).startswith("text ")
    assert tokens[-1] == PAD
    batch = {name: np.asarray(value)[None] for name, value in task.train[0].items()}
    # Only bytes of the text are predicted.
    weights = [float(task.loss_fn(task.params, batch, jax.random.key(seed))[0].weight) for seed in range(6)]
    assert max(weights) == (tokens < 256).sum()


def test_a_sample_shows_the_text_before_and_after(task: Task) -> None:
    assert task.sample is not None
    state = train_step(task.loss_fn, optax.sgd(0.0)).init(task.params)
    before, after = task.sample(state, 0).split("\n→\n")
    assert "█" in before
    assert len(before) == 16
    assert after


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 9}, "hidden_size 9 is not divisible by num_attention_heads 2"),
        ({"seq_len": 2}, "seq_len must be at least 3, got 2"),
        ({"data": Path("nowhere.txt")}, "nowhere.txt does not exist"),
    ],
)
def test_invalid_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MaskedLanguageRecipe(**{**vars(SMALL), **settings}).task()
