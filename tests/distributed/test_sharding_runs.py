"""Runs on a mesh: console, metrics, checkpoints, and resuming on another mesh."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe import Console
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import preflight, run_training
from jaxtrain.runner.checkpoint import saved_steps
from jaxtrain.runner.training import build_training
from jaxtrain.step import compiler_options
from tests.distributed.test_sharding_step import run_with_devices

RECIPE = dataclasses.replace(
    RECIPES["digits-mlp"],
    **{"hidden": 16, "batch_size": 16, "accumulate": 2, "steps": 8, "schedule": "constant", "warmup_steps": 2},
    **{"log_every": 1, "eval_every": 4, "save_every": 4},
)


class RecordingConsole(Console):
    def __init__(self):
        super().__init__()
        self.recorded = {}

    def facts(self, facts):
        self.recorded |= facts


def train_recipe(folder, resume=False, **settings):
    console = RecordingConsole()
    run_training(
        "digits-mlp", dataclasses.replace(RECIPE, **settings), RunFolder(folder), resume=resume, console=console
    )
    return console.recorded


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): line[name]
        for line in lines
        for name in ("loss", "grad_norm", "eval_loss")
        if name in line
    }


def assert_same_metrics(folder, other):
    numbers = logged(folder)
    assert numbers.keys() == logged(other).keys()
    for key, value in logged(other).items():
        assert np.isclose(numbers[key], value, rtol=1e-5), key


def test_a_run_on_a_mesh_equals_one_device_and_resumes_on_another_mesh(tmp_path):
    alone, meshed = tmp_path / "alone", tmp_path / "meshed"
    facts = train_recipe(alone)
    assert "mesh" not in facts
    assert facts["effective batch"] == "16 = 8 × 2 micro-batches × 1 devices"
    facts = train_recipe(meshed, mesh="fsdp=4", steps=4)
    assert facts["effective batch"] == "16 = 2 × 2 micro-batches × 4 devices"
    assert re.fullmatch(r"fsdp 4; 0\.0 MiB of parameters and .* state per device", facts["mesh"])
    assert saved_steps(meshed / "checkpoints") == [0, 4]
    train_recipe(meshed, resume=True, mesh="data=2,tensor=2")
    assert_same_metrics(meshed, alone)


@pytest.mark.nightly
def test_a_run_on_four_devices_resumes_on_two_and_on_eight(tmp_path):
    train_recipe(tmp_path / "alone", steps=12)
    for settings in ({"mesh": "fsdp=4", "steps": 4}, {"mesh": "data=2", "steps": 8}, {"mesh": "data=2,fsdp=4"}):
        program = (
            "import sys; from pathlib import Path; from tests.distributed.test_sharding_runs import train_recipe;"
            f"train_recipe(Path(sys.argv[1]), resume='auto', **{ {'steps': 12, **settings}!r})"
        )
        devices = math.prod(map(int, re.findall(r"\d+", settings["mesh"])))
        run_with_devices(devices, "-c", program, str(tmp_path / "resumed"))
    assert_same_metrics(tmp_path / "resumed", tmp_path / "alone")


@pytest.mark.nightly
def test_a_run_in_a_pipeline_equals_one_device_and_resumes_on_another_mesh(tmp_path):
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "seq_len": 16, "dropout": 0.1}
    settings = {field: getattr(RECIPE, field) for field in ("batch_size", "schedule", "warmup_steps", "log_every")}
    recipe = dataclasses.replace(RECIPES["gpt-stdlib"], **sizes, **settings, accumulate=4, eval_every=3, save_every=3)

    def run(folder, resume=False, **settings):
        console, changed = RecordingConsole(), dataclasses.replace(recipe, **{"steps": 6, **settings})
        run_training("gpt-stdlib", changed, RunFolder(folder), resume=resume, console=console)
        return console.recorded

    run(tmp_path / "alone")
    facts = run(tmp_path / "pipelined", mesh="pipeline=4", steps=3)
    assert facts["mesh"].endswith("43% of the time is the pipeline's bubble")
    run(tmp_path / "pipelined", resume=True, mesh="data=2,fsdp=2")
    assert_same_metrics(tmp_path / "pipelined", tmp_path / "alone")


def test_the_compiler_options_of_a_run_on_several_gpus_are_printed(monkeypatch):
    training = build_training(dataclasses.replace(RECIPE, mesh="fsdp=4"))
    options = compiler_options(deterministic=False, platform="gpu", devices=4, pipelines_layers=False)
    assert training.step.compiler_options is None  # on CPUs

    def printed():
        state, batch = training.shapes(), training.loader.peek()
        return preflight.describe(training.task, state, batch, training.recipe, options).get("compiler options")

    assert printed() is None
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(preflight, "run_devices", lambda mesh: [gpu] * 4)
    assert printed() == (
        "xla_gpu_{enable_latency_hiding_scheduler=true, experimental_parallel_collective_overlap_limit=4}"
    )


def test_preflight_rejects_invalid_meshes():
    with pytest.raises(
        UserError, match=r"batch_size 12 is not divisible by accumulate 2 × the 4 devices of mesh 'fsdp=4'"
    ):
        preflight.check_settings(dataclasses.replace(RECIPE, batch_size=12, mesh="fsdp=4"))
    with pytest.raises(UserError, match="mesh 'fdsp=4' has an axis 'fdsp'"):
        preflight.check_settings(dataclasses.replace(RECIPE, mesh="fdsp=4"))
