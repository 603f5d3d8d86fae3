"""The recipes' optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.recipes import RECIPES
from jaxtrain.runner.optimizer import optimizer, schedule


def test_the_schedule_rises_to_lr_and_falls_to_a_tenth():
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], steps=100, warmup_steps=10, lr=1.0)
    rates = [float(schedule(recipe)(i)) for i in range(101)]
    assert rates[0] == 0
    assert rates[10] == max(rates) == 1.0
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_shorter_than_its_warm_up_still_has_a_schedule(steps):
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], steps=steps)
    assert all(np.isfinite(float(schedule(recipe)(i))) for i in range(steps))


def test_only_matrices_decay():
    params = {
        "fc": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "ln": {"scale": jnp.ones(2)},
        "wte": jnp.ones((2, 2)),
    }
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], warmup_steps=0, weight_decay=0.5)
    tx = optimizer(recipe)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        updates, _ = tx.update(zeros, tx.init(params), params)
    assert float(abs(updates["fc"]["kernel"]).min()) > 0
    assert float(abs(updates["wte"]).min()) > 0
    assert float(abs(updates["fc"]["bias"]).max()) == float(abs(updates["ln"]["scale"]).max()) == 0
