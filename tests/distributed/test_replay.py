"""`jaxtrain replay` of a run on a mesh: on the same mesh, or on one device if its devices are missing."""

import dataclasses

import jax
import pytest

from jaxtrain.cli import main
from jaxtrain.cli.replay import _with_available_mesh
from jaxtrain.errors import UserError
from jaxtrain.recipes import RECIPES
from tests.cli.test_replay import lines, printed_losses

SMALL = "digits-mlp --hidden 8 --batch-size 8 --accumulate 2 --log-every 1 --eval-every 40 --save-every 4 --steps 6"


def test_a_run_is_replayed_on_its_mesh_or_on_one_device(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(f"train {SMALL} --mesh data=2,tensor=2 --out run".split()) == 0
    logged = lines("run")[6]["loss"]
    capsys.readouterr()

    assert main(["replay", "run", "6"]) == 0
    out = capsys.readouterr().out
    assert "devices" not in out
    assert "starting at step 4: 1 steps to rerun before step 6" in out
    own, wide = printed_losses(out)
    assert own == float(f"{logged:.7g}")
    assert wide == pytest.approx(own, rel=1e-6)

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert main(["replay", "run", "6"]) == 0
    out = capsys.readouterr().out
    assert "mesh data=2,tensor=2 needs 4 devices, found 1: using one device, equal up to rounding" in out
    assert printed_losses(out) == pytest.approx([logged, wide], rel=1e-6)


def test_a_nan_of_a_run_on_a_mesh_is_reproduced_and_located(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"train {SMALL} --lr 1e30 --clip-norm None --warmup-steps 0 --mesh fsdp=4 --batch-size 16 --out run"
    assert main(command.split()) == 1
    capsys.readouterr()
    assert main(["replay", "run", "2"]) == 1
    out = capsys.readouterr().out
    assert "nan in fp32, bit-identical to the run" in out
    assert "finite in float64: fp32 overflows" in out
    assert "jaxtrain/models/mlp.py:" in out


def test_batch_norm_per_device_is_not_replayed_on_one_device():
    recipe = dataclasses.replace(RECIPES["digits-resnet"], batch_norm="device", mesh="data=2,fsdp=2")
    assert _with_available_mesh(recipe, 4) is recipe
    message = "batch_norm 'device' needs the 4 devices of mesh 'data=2,fsdp=2', found 1: use 4 devices"
    with pytest.raises(UserError, match=message):
        _with_available_mesh(recipe, 1)
    assert _with_available_mesh(dataclasses.replace(recipe, mesh="tensor=4"), 1).mesh is None
    assert _with_available_mesh(dataclasses.replace(recipe, mesh=None), 4).mesh is None
