"""The two towers: retrieval of held-out names, and what accumulation does to the loss."""

from dataclasses import replace

import numpy as np

import jaxtrain as jt
from jaxtrain.data.batches import training_batches
from tests.examples.test_examples import load


def test_retrieval_beats_chance_after_a_short_training(tmp_path):
    recipe = load("two_tower.py::Docstrings", width=64, batch_size=64, steps=80, lr=1e-2, eval_every=80)
    first, last = (line for line in jt.fit(recipe, tmp_path / "run", quiet=True).history if "eval_top5" in line)
    names = len(recipe.task().validation["name"])
    assert first["eval_top5"] < 20 / names
    assert last["eval_top5"] > 40 / names


def test_micro_batches_have_fewer_negatives_and_a_lower_loss():
    task = load("two_tower.py::Docstrings", width=8).task()
    batch = next(training_batches(task.train, 64, 0))
    whole, _ = task.loss_fn(task.params, batch, None)
    quarters = [
        task.loss_fn(task.params, {name: x[i : i + 16] for name, x in batch.items()}, None)[0] for i in (0, 16, 32, 48)
    ]
    assert whole.weight == sum(loss.weight for loss in quarters) == 64
    assert float(whole.total) > 1.2 * sum(float(loss.total) for loss in quarters)
    # Chance is log(N), to which the random towers are near.
    assert np.log(64) - 1 < float(whole.total) / 64 < np.log(64) + 1


def test_a_mesh_keeps_the_negatives_of_the_whole_batch(tmp_path):
    recipe = load("two_tower.py::Docstrings", width=8, batch_size=16, steps=3, log_every=1, eval_every=3)
    one, four = (
        jt.fit(replace(recipe, mesh=mesh), tmp_path / str(mesh), quiet=True).history for mesh in (None, "data=4")
    )
    losses = [[line["loss"] for line in history if "loss" in line] for history in (one, four)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
