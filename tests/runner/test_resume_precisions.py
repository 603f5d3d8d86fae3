"""A run that is killed resumes to the same bits with everything that a low precision remembers."""

import json
import shutil
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import per_layer_loss_scale
from jaxtrain.optim import adamw, adamw8bit
from jaxtrain.runner.checkpoint import Checkpoints, saved_steps
from tests.runner.test_checkpoint import same

LAYERS, WIDTH, EXAMPLES = 2, 32, 64
CLOCK = {"tokens_per_s", "examples_per_s", "step_time_s", "input_wait_s", "peak_memory_bytes"}
"""Fields of metrics.jsonl that differ between two runs of the same bits."""


def loss_fn(params, batch, rng):
    del rng
    layer = jt.block(lambda x, kernel: x + jax.nn.gelu(x @ kernel))
    x, _ = jax.lax.scan(lambda x, kernel: (layer(x, kernel), None), batch["x"], params["layers"])
    return jt.Loss.of((x @ params["head"] - batch["y"]) ** 2), {}


@dataclass(frozen=True, kw_only=True)
class Layers(jt.Recipe):
    """A regression with two layers."""

    steps: int = 8
    batch_size: int = 16
    lr: float = 1e-2
    accumulate: int = 2
    save_every: int = 3
    log_every: int = 2
    eval_every: int = 4
    warmup_steps: int = 2

    def task(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        kernels = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH
        return jt.Task(
            init=lambda: {"layers": jnp.asarray(kernels), "head": jnp.ones(WIDTH) / WIDTH},
            loss_fn=loss_fn,
            train={"x": x, "y": np.sin(x.sum(1))},
            validation={"x": x[:16], "y": np.sin(x[:16].sum(1))},
        )


CASES = {
    "fp8_delayed": {"precision": "fp8_delayed"},
    "bf16_params_kahan": {"precision": "bf16_params_kahan"},
    "bf16_params_stochastic": {"precision": "bf16_params_stochastic"},
    "adamw8bit": {"precision": "fp8", "optimizer": "adamw8bit(min_8bit_size=1)"},
    "per_layer_loss_scale": {
        "precision": "fp16",
        "loss_scale": "per_layer_loss_scale(init_scale=262144.0, growth_interval=2)",
    },
}


class KilledError(Exception):
    """Ends a run."""


def kill(step, metrics, state):
    if step == 5:
        raise KilledError


def lines(fitted):
    written = map(json.loads, (fitted.run.path / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in written]


def remembered(name, state):
    """Return what the precision remembers."""
    return {
        "fp8_delayed": state.scales,
        "bf16_params_kahan": state.compensation,
        "bf16_params_stochastic": state.params,
        "adamw8bit": [x for x in jax.tree.leaves(state.opt_state) if x.dtype == np.uint8],
        "per_layer_loss_scale": state.loss_scale.blocks if name == "per_layer_loss_scale" else None,
    }[name]


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_resumes_to_the_same_bits(name, tmp_path):
    recipe = Layers(**CASES[name])
    whole = jt.fit(recipe, tmp_path / "whole", quiet=True)
    with pytest.raises(KilledError):
        jt.fit(recipe, tmp_path / "parts", quiet=True, on_step=kill)
    # The process did not live to save this one. Lines of metrics.jsonl are means of steps 3 and 4, and of 5 and 6.
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "5")
    assert max(saved_steps(tmp_path / "parts" / "checkpoints")) == 3
    at_the_kill = {}

    def first(step, metrics, state):
        at_the_kill.setdefault("step", step)
        at_the_kill.setdefault("remembered", jax.device_get(remembered(name, state)))

    parts = jt.fit(recipe, tmp_path / "parts", quiet=True, resume=True, on_step=first)
    assert at_the_kill["step"] == 4
    assert same(parts.state, whole.state)
    assert lines(parts) == lines(whole)
    assert not np.array_equal(whole.state.params["layers"], recipe.task().params["layers"])
    assert jax.tree.leaves(at_the_kill["remembered"])
    assert not same(at_the_kill["remembered"], remembered(name, whole.state))


@pytest.mark.parametrize("name", CASES)
def test_a_state_saved_inside_a_window_continues_to_the_same_bits(name, tmp_path):
    task = Layers().task()
    scaler = per_layer_loss_scale(LAYERS, init_scale=2.0**18, growth_interval=2)
    step = jt.train_step(
        loss_fn,
        adamw8bit(1e-2, min_8bit_size=1) if name == "adamw8bit" else adamw(1e-2),
        precision=CASES[name]["precision"],
        accumulate=2,
        loss_scale=scaler if name == "per_layer_loss_scale" else None,
    )
    state = step.init(task.params, streaming=True)
    for i in range(8):
        if i == 5:
            with Checkpoints(tmp_path / "checkpoints") as checkpoints:
                checkpoints.save(state, {})
        state, _ = step.micro(state, {key: x[8 * i : 8 * i + 8] for key, x in task.train.items()})
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        restored, _ = checkpoints.restore(step.init(task.params, streaming=True))
    assert int(restored.micro_step) == 5
    for i in range(5, 8):
        restored, _ = step.micro(restored, {key: x[8 * i : 8 * i + 8] for key, x in task.train.items()})
    assert same(restored, state)
