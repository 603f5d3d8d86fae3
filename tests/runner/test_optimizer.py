"""The optimizer, schedule and loss scale of a recipe."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from jaxtrain.runner import interval
from jaxtrain.runner.loss_scales import loss_scale, step_loss_scale
from jaxtrain.runner.recipe_step import frozen, optimizer_expression, recipe_optimizer, schedule
from jaxtrain.step import TrainState


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


def test_weight_decay_applies_only_to_matrices():
    params = {
        "fc": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "ln": {"scale": jnp.ones(2)},
        "wte": jnp.ones((2, 2)),
    }
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], warmup_steps=0, weight_decay=0.5)
    tx = recipe_optimizer(recipe)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        updates, _ = tx.update(zeros, tx.init(params), params)
    assert float(abs(updates["fc"]["kernel"]).min()) > 0
    assert float(abs(updates["wte"]).min()) > 0
    assert float(abs(updates["fc"]["bias"]).max()) == float(abs(updates["ln"]["scale"]).max()) == 0


def test_parameters_of_the_setting_and_of_the_task_are_frozen():
    task = jt.Task(init=dict, loss_fn=None, train={}, frozen=lambda path: path == "a")
    of_both = frozen(dataclasses.replace(RECIPES["digits-mlp"], frozen="b"), task)
    assert [path for path in ("a", "b", "c") if of_both(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "first", "peak", "last"),
    [
        ("warmup-cosine", 0.0, 10, 0.1),
        ("wsd", 0.0, 10, 0.0),
        ("linear", 0.0, 10, 0.0),
        ("constant", 0.0, 10, 1.0),
        ("onecycle", 0.04, 29, 4e-06),
    ],
)
def test_a_schedule_is_chosen_by_name(name, first, peak, last):
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], steps=100, warmup_steps=10, lr=1.0, schedule=name)
    rates = [float(schedule(recipe)(i)) for i in range(101)]
    assert (rates[0], max(rates), rates[100]) == pytest.approx((first, 1.0, last))
    assert rates.index(max(rates)) == peak
    plateau = sum(rate == 1.0 for rate in rates)
    assert plateau == {"wsd": 71, "constant": 91}.get(name, 1)


def test_an_optimizer_by_name_takes_its_arguments_from_the_other_settings():
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], optimizer="sgd(momentum=0.9)", schedule="constant", lr=0.5)
    assert str(optimizer_expression(recipe)) == (
        "sgd(learning_rate=wsd(lr=0.5, warmup_steps=20, stable_steps=580, decay_steps=0, final_lr=0.5), "
        "weight_decay=0.1, momentum=0.9)"
    )
    own = dataclasses.replace(recipe, optimizer="adamw(weight_decay=0.3)", beta2=0.7)
    assert optimizer_expression(own).arguments["weight_decay"] == 0.3
    assert optimizer_expression(own).arguments["b2"] == 0.7


def test_a_loss_scale_is_parsed_like_an_optimizer():
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], loss_scale="dynamic_loss_scale(init_scale=8.0)")
    assert float(loss_scale(recipe).init(None).scale) == 8
    assert loss_scale(RECIPES["gpt-stdlib"]) is None


def test_the_blocks_of_a_per_layer_loss_scale_are_counted(tmp_path):
    def state(expression):
        recipe = dataclasses.replace(RECIPES["gpt-stdlib"], loss_scale=expression, n_layer=3)
        return step_loss_scale(recipe, recipe.task()).init(None)

    assert len(state("per_layer_loss_scale(underflow=0.001)").blocks.scale) == 3
    assert len(state("per_layer_loss_scale(blocks=3)").blocks.scale) == 3
    with pytest.raises(UserError, match="has blocks=2, but the program has 3: use blocks=3"):
        state("per_layer_loss_scale(blocks=2)")
    images = dataclasses.replace(RECIPES["digits-mlp"], loss_scale="per_layer_loss_scale()")
    with pytest.raises(UserError, match="no layer of the program is marked"):
        step_loss_scale(images, images.task())


def test_loss_scales_of_layers_are_logged_in_their_order():
    scales = {f"loss_scales/{i}": 2.0**i for i in range(12)}
    logged = interval._other_metrics(
        [{"loss": 1.0, "weight": 1.0, **dict.fromkeys(scales, 1.0)}, {"loss": 1.0, "weight": 1.0, **scales}]
    )
    assert [*logged.items()] == [*scales.items()]


def test_learning_rates_of_groups_are_logged():
    groups = "{'a': sgd(learning_rate=0.5), 'b': sgd(learning_rate=0.25)}"
    tx = recipe_optimizer(dataclasses.replace(RECIPES["gpt-stdlib"], optimizer=groups))
    empty = TrainState(*[None] * len(TrainState._fields))
    state = empty._replace(opt_state=tx.init({"a": jnp.ones(1), "b": jnp.ones(1)}))
    assert interval._learning_rates(state.opt_state) == (0.5, {"0": 0.5, "1": 0.25})


def test_mask_none_decays_every_parameter():
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], warmup_steps=0, optimizer="adamw(weight_decay=0.5, mask=None)")
    params = {"fc": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    tx = recipe_optimizer(recipe)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert float(abs(updates["fc"]["bias"]).min()) > 0
