"""Plausible mistakes in a recipe, a task or a call of `fit`: one line with the value and the remedy."""

import re
import traceback
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import jaxtrain as jt
from tests.step.test_mistakes import frames_of_the_package

X = np.ones((16, 3), np.float32)
DATA = {"x": X, "y": X.sum(1)}


def loss_fn(params, batch, rng):
    return jt.Loss.of((batch["x"] @ params["w"] - batch["y"]) ** 2), {}


def recipe(make_optimizer=None, *, task=None, settings=None, **fields):
    """Return a recipe whose task has these fields, or is `task`."""
    required = {"init": lambda: {"w": jnp.zeros(3)}, "loss_fn": loss_fn, "train": DATA}
    made = {"task": lambda self: task() if task else jt.Task(**{**required, **fields})}
    if make_optimizer:
        made["make_optimizer"] = make_optimizer
    kind = dataclass(frozen=True, kw_only=True)(type("Mine", (jt.Recipe,), {**made, "__annotations__": {}}))
    return kind(**{"steps": 2, "batch_size": 8, **(settings or {})})


class Undecorated(jt.Recipe):
    width: int = 3


def torch_data(batch_size):
    return DataLoader(TensorDataset(torch.ones(16, 3), torch.ones(16)), batch_size)


MISTAKES = {
    # What is given to fit.
    "a class": (lambda: jt.Recipe, {}, r"recipe must be an instance, got the class Recipe: use Recipe\(\)"),
    "a task": (lambda: recipe().task(), {}, r"recipe must be a jaxtrain\.Recipe, got Task: subclass"),
    "no dataclass": (Undecorated, {}, r"Undecorated is not a dataclass, so that width is no setting: decorate it"),
    "epochs": (recipe, {"epochs": 3}, r"fit\(\) got .* 'epochs': the arguments are recipe, out, resume"),
    "resume in words": (recipe, {"resume": "yes"}, r"resume must be True, False or 'auto', got 'yes': 'auto' starts"),
    "resume of nothing": (recipe, {"resume": True}, r".*run holds no run: use resume='auto' to start one"),
    "an event of one argument": (
        recipe,
        {"on_step": lambda step: None},
        r"on_step must take \(step, metrics, state\), got <lambda>\(step\): change",
    ),
    "an event that is a number": (
        recipe,
        {"on_checkpoint": 3},
        r"on_checkpoint must be a function, got 3: use def on_c",
    ),
    # The task.
    "no task": (lambda: recipe(task=lambda: None), {}, r"Mine\.task returned NoneType: return jaxtrain\.Task\("),
    "a dict as task": (lambda: recipe(task=dict), {}, r"Mine\.task returned dict: return jaxtrain\.Task\(init"),
    "params as init": (
        lambda: recipe(init={"w": X}),
        {},
        r"Task\.init must be a function, got dict: use lambda: params",
    ),
    "init of a key": (
        lambda: recipe(init=lambda key: {"w": X}),
        {},
        r"Task\.init must take no arguments, got <lambda>\(key\): create the key inside, as in jax\.random\.key",
    ),
    "evaluate of a state": (
        lambda: recipe(evaluate=lambda state: {}),
        {},
        r"Task\.evaluate must take \(state, batches\), got <lambda>\(state\): change",
    ),
    "a predict of a batch": (
        lambda: recipe(predict=lambda params, batch: 0),
        {},
        r"Task\.predict must take \(params, batch, model_state\), got <lambda>\(params, batch\): change",
    ),
    "evaluate returns a number": (
        lambda: recipe(evaluate=lambda state, batches: 0.5),
        {},
        r"Task\.evaluate returned float: return a dict, as in",
    ),
    "no examples to evaluate": (
        lambda: recipe(validation={"x": X[:0], "y": X[:0, 0]}),
        {},
        r"the data to evaluate have no examples: give some, or leave Task\.validation at None",
    ),
    "eval_rows of 0": (lambda: recipe(eval_rows=0), {}, r"eval_rows must be at least 1, got 0: None evaluates all"),
    "patience without evaluation": (
        lambda: recipe(settings={"patience": 2}),
        {},
        r"patience 2 needs an evaluation: give Task\.validation or Task\.evaluate",
    ),
    "a best metric without evaluation": (
        lambda: recipe(best_metric="accuracy"),
        {},
        r"best_metric 'accuracy' needs an evaluation: give",
    ),
    # The optimizer.
    "PyTorch's class": (
        lambda: recipe(lambda self: torch.optim.SGD),
        {},
        r"optimizer must be .*, got the class torch\.optim\.SGD: use one of jaxtrain\.optim",
    ),
    "a name": (lambda: recipe(lambda self: "adamw"), {}, r"optimizer must be .*, got str 'adamw': use one of jaxtrain"),
    # The data.
    "arrays in a tuple": (
        lambda: recipe(train=(X, X)),
        {},
        r"the data is a tuple of 2 arrays: name them, as in \{'x': images",
    ),
    "batch_keys in one string": (
        lambda: recipe(batch_keys="xy"),
        {},
        r"batch_keys must be a tuple of names, got 'xy': use \('xy',\)",
    ),
    "a DataLoader of examples": (
        lambda: recipe(train=torch_data(None), batch_keys=("x", "y")),
        {},
        r"'y' of batch 0 of epoch 0 of the DataLoader is a scalar: give the DataLoader batch_size=8",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_one_line_before_the_run(name, tmp_path):
    make, arguments, message = MISTAKES[name]
    with pytest.raises(jt.UserError) as raised:
        jt.fit(make(), tmp_path / "run", quiet=True, **arguments)
    assert re.match(message, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(frames_of_the_package(raised.value)) <= 2
    assert "site-packages" not in "".join(traceback.format_exception(raised.value))
    assert not (tmp_path / "run").exists()
