"""Image classification with running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import eval_step, train_step
from jaxtrain.errors import UserError
from jaxtrain.optim import sgd
from jaxtrain.recipes.resnet import ResNetRecipe

SMALL = ResNetRecipe(width=4)


def test_running_statistics_are_updated_in_training_and_fixed_in_evaluation() -> None:
    task = SMALL.task()
    step = train_step(task.loss_fn, sgd(0.1))
    state = step.init(task.params, model_state=task.model_state)
    batch = {name: np.stack([task.train[i][name] for i in range(16)]) for name in ("image", "label")}
    first = jax.tree.map(jnp.copy, state.model_state)
    evaluated = eval_step(task.loss_fn)(state, batch)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, state.model_state)))
    state, metrics = step(state, batch)
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, state.model_state)))
    # Batch statistics differ from the running statistics, so the two modes differ.
    assert abs(float(metrics["loss"]) - float(evaluated["loss"][0] / evaluated["loss"][1])) > 1e-3


def test_images_without_channels_are_refused(tmp_path) -> None:
    np.savez(tmp_path / "flat.npz", x=np.zeros((20, 5), np.float32), y=np.arange(20) % 10)
    with pytest.raises(UserError, match=r"images must have height, width and channels, got shape \[5\]"):
        ResNetRecipe(width=4, data=tmp_path / "flat.npz").task()
