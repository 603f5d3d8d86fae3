"""What changed between a stop and a resumption is refused or reported."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.data import digest_of
from jaxtrain.errors import UserError
from jaxtrain.recipes.image import MLPRecipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner.lock import RunLock
from jaxtrain.runner.resume import CHANGEABLE, check_saved, saved_settings

RUN = RunFolder(Path("runs/x"))
ARRAYS = {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6) % 2}
TASK = jt.Task(init=dict, loss_fn=lambda *args: None, train=ARRAYS, validation=ARRAYS)
OTHERS = {int: 77, float: 0.77, bool: True, str: "other"}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MLPRecipe) if field.init])
def test_every_setting_that_was_edited_is_refused_unless_it_may_change(field):
    recipe = MLPRecipe()
    before = getattr(recipe, field)
    other = next(
        value for kind, value in OTHERS.items() if value != before and (before is None or type(before) is kind)
    )
    saved = json.loads(json.dumps(saved_settings(recipe, TASK)))
    edited = dataclasses.replace(recipe, **{field: other})
    assert check_saved(saved, saved_settings(recipe, TASK), recipe, RUN) == []
    if field in CHANGEABLE:
        assert check_saved(saved, saved_settings(edited, TASK), edited, RUN) == []
        return
    with pytest.raises(UserError, match=f"config.json sets {field} to .*, but the run was trained with"):
        check_saved(saved, saved_settings(edited, TASK), edited, RUN)


def test_a_checkpoint_without_settings_is_accepted():
    assert check_saved({"next_batch": 3}, saved_settings(MLPRecipe(), TASK), MLPRecipe(), RUN) == []


def test_data_that_was_modified_is_reported(tmp_path):
    file = tmp_path / "data.npz"
    file.write_bytes(b"rows")
    recipe = MLPRecipe(data=file)
    saved = json.loads(json.dumps(saved_settings(recipe, TASK)))
    assert check_saved(saved, saved_settings(recipe, TASK), recipe, RUN) == []
    file.write_bytes(b"rowz")
    os.utime(file, ns=(1, 1))
    (change,) = check_saved(saved, saved_settings(recipe, TASK), recipe, RUN)
    assert change.startswith(f"{file} was modified after the run was saved")
    # Data may move: its files are new ones.
    moved = dataclasses.replace(recipe, data=file.rename(tmp_path / "moved.npz"))
    assert check_saved(saved, saved_settings(moved, TASK), moved, RUN) == []


def changed(name, array):
    return {**ARRAYS, name: array}


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    "arrays",
    [
        changed("x", ARRAYS["x"] + np.eye(6, 2)),
        changed("x", ARRAYS["x"][::-1]),
        changed("x", ARRAYS["x"].astype(int)),
        changed("y", 1 - ARRAYS["y"]),
        {"y": ARRAYS["y"], "z": ARRAYS["x"]},
    ],
    ids=["values", "order", "dtype", "labels", "names"],
)
def test_arrays_that_were_modified_are_reported(part, arrays):
    recipe, after = MLPRecipe(), dataclasses.replace(TASK, **{part: arrays})
    saved = json.loads(json.dumps(saved_settings(recipe, TASK)))
    (change,) = check_saved(saved, saved_settings(recipe, after), recipe, RUN)
    assert change.startswith(f"the arrays of Task.{part} were modified after the run was saved: results may differ")


def test_a_digest_of_large_arrays_reads_a_part_of_them(monkeypatch):
    monkeypatch.setattr("jaxtrain.data.columns._DIGESTED_BYTES", 16)
    assert digest_of(ARRAYS) == digest_of(changed("x", ARRAYS["x"] + np.eye(6, 2, -1)))
    assert digest_of(ARRAYS) != digest_of(changed("x", ARRAYS["x"] + np.eye(6, 2)))
    assert digest_of([{"x": 1}]) is digest_of(None) is None


def test_a_resumed_run_reports_another_environment_and_keeps_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = "train digits-mlp --hidden 4 --batch-size 8 --out run"
    assert main(f"{train} --steps 2 --quiet".split()) == 0
    path = Path("run/config.json")
    config = json.loads(path.read_text())
    assert "earlier" not in config
    config["versions"]["jax"], config["variables"] = "0.4.1", {"XLA_FLAGS": "--xla_one"}
    path.write_text(json.dumps(config))
    with Path("run/metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    capsys.readouterr()
    assert main(f"{train} --resume --steps 4".split()) == 0
    output = capsys.readouterr().out
    assert "the run was started with jax 0.4.1, here " in output
    assert re.search("the run was started with XLA_FLAGS --xla_one, here .*: results may not be bit-identical", output)
    assert "run/metrics.jsonl: damaged lines (3) were moved to metrics.superseded.jsonl" in output
    config = json.loads(path.read_text())
    assert config["versions"]["jax"] != "0.4.1"
    (earlier,) = config["earlier"]
    assert earlier["versions"]["jax"] == "0.4.1"
    assert earlier["settings"]["steps"] == 2
    config["settings"]["lr"] = 0.5
    path.write_text(json.dumps(config))
    assert main(f"{train} --resume --steps 6".split()) == 2
    error = capsys.readouterr().err
    assert "run/config.json sets lr to 0.5, but the run was trained with 0.00" in error
    assert error.count("\n") == 1


def test_files_deleted_from_a_run_in_progress_are_written_again(tmp_path):
    run = RunFolder(tmp_path / "run")

    def delete(step, metrics, state):
        if step == 3:
            run.config.unlink()
            run.metrics.unlink()

    recipe = MLPRecipe(hidden=4, batch_size=8, steps=4, log_every=1, eval_every=4)
    done = jt.fit(recipe, run.path, quiet=True, on_step=delete)
    assert [line["step"] for line in done.history] == [0, 1, 2, 3, 4]
    assert json.loads(run.config.read_text())["settings"]["hidden"] == 4


def test_a_deleted_lock_admits_no_second_process(tmp_path):
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.take()
        (tmp_path / "lock").unlink()
        with pytest.raises(UserError, match="is in use by another process: wait for it"):
            second.take()
        assert not second.held
    with RunLock(tmp_path) as third:
        third.take()
        assert third.held
