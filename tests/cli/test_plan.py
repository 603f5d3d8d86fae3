"""`jaxtrain plan` and `train --micro-batch auto` from the command line."""

import json
import shlex
from pathlib import Path

import jax
import pytest

from jaxtrain.cli import main
from jaxtrain.cli import train as train_command
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe

from .conftest import TINY_GPT

IMAGES = "digits-resnet --width 8 --batch-size 16"


def run_command(capsys, command):
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_plan_has_a_table_and_the_command_to_run(capsys):
    status, out, _ = run_command(capsys, f"plan {IMAGES} --json --memory 16GiB")
    assert status == 0
    found = json.loads(out)
    assert found["memory_bytes"] == 16 * 2**30
    (row,) = found["rows"]
    assert row["chosen"]
    assert row["fits"]
    assert (row["micro_batch"], row["accumulate"], row["relative_time"]) == (16, 1, 1.0)
    assert found["command"] == f"jaxtrain train {IMAGES.replace('--width 8 --batch-size 16', '')}".strip() + (
        " --batch-size 16 --width 8"
    )
    assert not Path("runs").exists()


def test_a_precision_is_not_truncated_in_a_table_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_command(capsys, f"plan {IMAGES} --memory 16GiB --precision bf16_compute")
    (chosen,) = (line.split() for line in out.splitlines() if line.lstrip().startswith("→"))
    assert chosen[1:5] == ["16", "1", "none", "bf16_compute"]


@pytest.mark.nightly
def test_a_batch_that_does_not_fit_is_split_into_micro_batches(capsys, text_folder):
    status, out, _ = run_command(capsys, f"plan gpt-stdlib {TINY_GPT} --data {text_folder} --memory 250KB")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "gpt-stdlib · cpu · 244 KiB"
    assert "compiling micro-batch 8 × 1, remat none, fp32 …" in lines
    rows = [line.split() for line in lines if line.lstrip().startswith(("✗", "→"))]
    assert ["✗", "8", "1", "none", "fp32"] in [row[:5] for row in rows]
    (chosen,) = (row for row in rows if row[0] == "→")
    assert (chosen[1], chosen[2]) == ("2", "4")
    assert lines[-1].startswith("jaxtrain train gpt-stdlib --batch-size 8 --accumulate 4 --data ")


def test_a_plan_in_which_nothing_fits_is_a_one_line_error(capsys):
    status, _, err = run_command(capsys, f"plan {IMAGES} --memory 10KiB")
    assert status == 1
    assert err.startswith("jaxtrain: nothing fits 10.0 KiB: parameters and optimizer state alone take ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"plan {IMAGES} --memory 16", "'16' is not an amount of memory: write it with its unit, as in 16GiB or 40GB"),
        (f"plan {IMAGES} --memory -3GiB", "'-3GiB' is not an amount of memory"),
        ("plan gpt-stdlob", "did you mean 'gpt-stdlib'"),
        (f"plan {IMAGES} --accumulate 3", "is not divisible by accumulate 3"),
        (f"plan {IMAGES} --remat nothing", "remat 'nothing' is unknown"),
        (f"train {IMAGES} --micro-batch 8", "--micro-batch must be auto, got '8'"),
    ],
)
def test_wrong_usage_is_a_one_line_error(command, message, capsys):
    status, _, err = run_command(capsys, command)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_micro_batch_auto_chooses_a_size_that_fits(monkeypatch, capsys, text_folder):
    recipe = f"gpt-stdlib {TINY_GPT} --data {text_folder} --steps 2 --accumulate 8"
    monkeypatch.setattr(train_command, "device_memory", lambda: 250_000)
    status, out, _ = run_command(capsys, f"train {recipe} --micro-batch auto --out run")
    assert status == 0, out
    chosen = read_recipe(RunFolder(Path("run")))[1]
    assert 1 <= chosen.accumulate < 8
    assert chosen.batch_size == 8
    assert chosen.precision == "fp32"
    assert f"chosen: micro-batch {8 // chosen.accumulate} × {chosen.accumulate}, remat {chosen.remat}, fp32: " in out
    # An existing run is rejected before anything is compiled; a resumed run keeps its settings.
    status, out, err = run_command(capsys, f"train {recipe} --micro-batch auto --out run")
    assert (status, "compiling" in out) == (2, False)
    assert "already holds a run" in err
    status, out, _ = run_command(capsys, "train --resume --out run --micro-batch auto --steps 3")
    assert (status, "chosen:" in out) == (0, False)
    assert read_recipe(RunFolder(Path("run")))[1].accumulate == chosen.accumulate
    assert jax.config.jax_compilation_cache_dir
