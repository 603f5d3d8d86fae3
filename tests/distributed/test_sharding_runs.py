"""Runs on a mesh: what is told, what is logged, what is saved, and what goes on from it on another."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe import Console
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import fit, preflight
from jaxtrain.runner.checkpoint import saved_steps
from tests.distributed.test_sharding_step import in_a_process_of

RECIPE = dataclasses.replace(
    RECIPES["digits-mlp"],
    **{"hidden": 16, "batch_size": 16, "accumulate": 2, "steps": 8, "schedule": "constant", "warmup_steps": 2},
    **{"log_every": 1, "eval_every": 4, "save_every": 4},
)


class Told(Console):
    def __init__(self):
        super().__init__()
        self.told = {}

    def facts(self, facts):
        self.told |= facts


def trained(folder, resume=False, **settings):
    console = Told()
    fit("digits-mlp", dataclasses.replace(RECIPE, **settings), RunFolder(folder), resume=resume, console=console)
    return console.told


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): line[name]
        for line in lines
        for name in ("loss", "grad_norm", "eval_loss")
        if name in line
    }


def assert_alike(folder, other):
    numbers = logged(folder)
    assert numbers.keys() == logged(other).keys()
    for key, value in logged(other).items():
        assert np.isclose(numbers[key], value, rtol=1e-5), key


def test_a_run_on_a_mesh_is_that_of_one_device_and_goes_on_on_another(tmp_path):
    alone, meshed = tmp_path / "alone", tmp_path / "meshed"
    told = trained(alone)
    assert "mesh" not in told
    assert told["effective batch"] == "16 = 8 × 2 micro-batches × 1 devices"
    told = trained(meshed, mesh="fsdp=4", steps=4)
    assert told["effective batch"] == "16 = 2 × 2 micro-batches × 4 devices"
    assert re.fullmatch(
        r"data 1 × fsdp 4 × sequence 1 × tensor 1; 0\.0 MiB of parameters and .* state per device", told["mesh"]
    )
    assert saved_steps(meshed / "checkpoints") == [0, 4]
    trained(meshed, resume=True, mesh="data=2,tensor=2")
    assert_alike(meshed, alone)


@pytest.mark.slow
def test_a_run_of_four_devices_goes_on_on_two_and_on_eight(tmp_path):
    trained(tmp_path / "alone", steps=12)
    for settings in ({"mesh": "fsdp=4", "steps": 4}, {"mesh": "data=2", "steps": 8}, {"mesh": "data=2,fsdp=4"}):
        program = (
            "import sys; from pathlib import Path; from tests.distributed.test_sharding_runs import trained;"
            f"trained(Path(sys.argv[1]), resume='auto', **{ {'steps': 12, **settings}!r})"
        )
        devices = math.prod(map(int, re.findall(r"\d+", settings["mesh"])))
        in_a_process_of(devices, "-c", program, str(tmp_path / "moved"))
    assert_alike(tmp_path / "moved", tmp_path / "alone")


def test_meshes_that_no_run_can_have_are_refused_before_anything_is_read():
    with pytest.raises(
        UserError, match=r"batch_size 12 is not divisible by accumulate 2 × the 4 devices of mesh 'fsdp=4'"
    ):
        preflight.check_settings(dataclasses.replace(RECIPE, batch_size=12, mesh="fsdp=4"))
    with pytest.raises(UserError, match="mesh 'fdsp=4' has an axis 'fdsp'"):
        preflight.check_settings(dataclasses.replace(RECIPE, mesh="fdsp=4"))
