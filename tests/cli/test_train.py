"""`jaxtrain train` and `sample` from the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from jaxtrain.cli import main
from jaxtrain.cli.train import Train
from jaxtrain.flags import parse_known
from jaxtrain.recipes import RECIPES
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import Checkpoints, interval, loop, read_recipe
from jaxtrain.runner.checkpoint import restore_params, saved_steps
from jaxtrain.runner.lock import RunLock
from jaxtrain.runner.recipe_step import schedule

from .conftest import TINY_GPT

SMALL = "--batch-size 16 --log-every 2 --eval-every 4 --save-every 4"


class Killed(BaseException):
    """An exception that nothing catches."""


def run(command: str) -> int:
    return main(command.split())


def lines(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def final_params(folder: str):
    recipe = read_recipe(RunFolder(Path(folder)))[1]
    return restore_params(Path(folder, "checkpoints"), recipe.task().params)


def stop_after(step: int, monkeypatch) -> None:
    """Send SIGINT to this process during the given step."""
    add, seen = interval.Interval.add, []

    def signalling(self, metrics):
        seen.append(metrics)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGINT)
        add(self, metrics)

    monkeypatch.setattr(interval.Interval, "add", signalling)


def test_a_run_writes_config_metrics_checkpoints_and_report(capsys):
    assert run(f"train digits-mlp --steps 10 --hidden 32 {SMALL}") == 0
    out = capsys.readouterr().out
    folder = Path("runs/digits-mlp")
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"] == "digits-mlp"
    assert config["settings"]["steps"] == 10
    assert config["settings"]["seed"] == 0
    assert config["versions"]["jax"] == jax.__version__
    logged = [m for m in lines("runs/digits-mlp") if "loss" in m]
    expected = {"loss", "lr", "grad_norm", "loss_scale", "skipped", "step_time_s", "peak_memory_bytes"}
    assert all(expected | {"step", "examples_per_s"} <= set(m) for m in logged)
    assert [m["step"] for m in lines("runs/digits-mlp")] == [0, 2, 4, 6, 8, 10]
    assert [m["step"] for m in lines("runs/digits-mlp") if "eval_loss" in m] == [0, 4, 8, 10]
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [4, 8, 10]
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "src=" not in page
    assert "<link" not in page
    for printed in ("parameters", "first loss", "log(10)", "compiling the training step", "best evaluation", "left"):
        assert printed in out


def test_tensorboard_reads_the_scalars():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(f"train digits-mlp --steps 4 --hidden 16 {SMALL}") == 0
    events = EventAccumulator("runs/digits-mlp/tensorboard")
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [2, 4]
    logged = [m["loss"] for m in lines("runs/digits-mlp") if "loss" in m]
    np.testing.assert_allclose([e.value for e in events.Scalars("loss")], logged, rtol=1e-6)


def test_resuming_an_interrupted_run_is_bit_identical(monkeypatch, capsys):
    command = f"train digits-cnn --steps 9 --width 4 --accumulate 2 --precision fp16 {SMALL}"
    assert run(f"{command} --out whole") == 0
    with monkeypatch.context() as patched:
        stop_after(5, patched)
        assert run(f"{command} --out cut") == 130
    assert "stopped and saved at step 5" in capsys.readouterr().out
    assert run("train --resume --out cut") == 0
    for a, b in zip(jax.tree.leaves(final_params("whole")), jax.tree.leaves(final_params("cut")), strict=True):
        np.testing.assert_array_equal(a, b)
    numbers = ("step", "loss", "lr", "grad_norm", "loss_scale", "eval_loss")
    evaluated = [{k: m[k] for k in numbers} for m in lines("whole") if "eval_loss" in m and "loss" in m]
    assert evaluated == [{k: m[k] for k in numbers} for m in lines("cut") if "eval_loss" in m and "loss" in m]
    steps = [m["step"] for m in lines("cut")]
    assert len(steps) == len(set(steps))


def test_a_killed_run_logs_no_step_twice(monkeypatch):
    command = f"train digits-mlp --steps 9 --hidden 16 {SMALL}"

    def die(self, line, *media, step=6, write=loop.MetricsLog.write):
        write(self, line, *media)
        if line.step == step:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(loop.MetricsLog, "write", die)
        with pytest.raises(Killed):
            run(command)
    assert [m["step"] for m in lines("runs/digits-mlp")] == [0, 2, 4, 6]
    assert run("train digits-mlp --resume") == 0
    assert [m["step"] for m in lines("runs/digits-mlp")] == [0, 2, 4, 6, 8, 9]


def test_resuming_a_finished_run_reports_it_and_may_extend_it(capsys):
    assert run(f"train digits-mlp --steps 4 --hidden 16 {SMALL}") == 0
    assert run("train digits-mlp --resume") == 0
    assert "step 4 of 4 is done" in capsys.readouterr().out
    assert run("train digits-mlp --resume --steps 6") == 0
    assert lines("runs/digits-mlp")[-1]["step"] == 6
    assert read_recipe(RunFolder(Path("runs/digits-mlp")))[1].steps == 6


def test_the_logged_learning_rate_is_the_one_used():
    assert run(f"train digits-mlp --steps 10 --hidden 16 --warmup-steps 3 {SMALL}") == 0
    recipe = read_recipe(RunFolder(Path("runs/digits-mlp")))[1]
    logged = {m["step"]: m["lr"] for m in lines("runs/digits-mlp") if "lr" in m}
    # Step n makes the n-th update; schedules count from 0.
    assert logged == pytest.approx({n: float(schedule(recipe)(n - 1)) for n in (2, 4, 6, 8, 10)}, rel=1e-6)


def test_a_gpt_learns_its_text_and_generates_samples(text_folder, capsys):
    command = f"train --data {text_folder} --steps 30 --eval-every 15 --lr 1e-2 --warmup-steps 3 --dropout 0.1"
    assert run(f"{command} --remat full {TINY_GPT} --out run") == 0
    out = capsys.readouterr().out
    assert "unigram entropy" in out
    assert "─ sample ─" in out
    evaluations = [m["eval_loss"] for m in lines("run") if "eval_loss" in m]
    assert evaluations[-1] < 0.8 * evaluations[0]
    assert run("sample run --length 20 --temperature 0 --prompt the") == 0
    first = capsys.readouterr().out
    assert first.startswith("the")
    assert len(first) == len("the") + 20 + 1
    assert run("sample run --length 20 --temperature 0 --prompt the") == 0
    assert capsys.readouterr().out == first


def test_arrays_and_image_folders_of_the_user_train(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez("own.npz", x=rng.integers(0, 255, (40, 6, 5), np.uint8), y=rng.integers(0, 3, 40))
    assert run(f"train digits-mlp --data own.npz --classes 3 --steps 2 --hidden 8 {SMALL} --out a") == 0
    assert run("train --resume --data own.npz --out a") == 0
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 255, (6, 7, 3), np.uint8)).save(f"pets/{name}/{i}.png")
    assert run(f"train digits-cnn --data pets --classes 2 --steps 2 --width 2 {SMALL} --out b") == 0
    assert "uint8 [16, 6, 7, 3]" in capsys.readouterr().out


def untimed(folder: str) -> list[dict]:
    """Return the lines without values that differ between any two runs."""
    timed = ("step_time_s", "examples_per_s", "input_wait_s", "peak_memory_bytes")
    return [{k: v for k, v in m.items() if k not in timed} for m in lines(folder)]


def same_bits(one: str, other: str) -> bool:
    pairs = zip(jax.tree.leaves(final_params(one)), jax.tree.leaves(final_params(other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


TINY = f"train digits-mlp --steps 6 --hidden 8 {SMALL}"


def test_resume_auto_continues_after_every_kind_of_interruption(monkeypatch, capsys):
    """The run is killed before its first checkpoint, restarted, stopped, resumed and finished."""
    command = f"{TINY} --log-every 3 --resume auto --out looped"
    assert run(f"{TINY} --log-every 3 --out whole") == 0
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(command)
    assert [m["step"] for m in lines("looped")] == [0]
    assert run("train --resume --out looped") == 2
    assert "looped has no checkpoint: start it again with --resume auto" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        stop_after(5, patched)  # in the middle of an interval
        assert run(command) == 130
    assert [m["step"] for m in lines("looped")] == [0, 3, 4]
    assert run(command) == 0
    assert same_bits("whole", "looped")
    assert untimed("whole") == untimed("looped")
    capsys.readouterr()
    assert run(command) == 0
    assert "step 6 of 6 is done" in capsys.readouterr().out
    assert untimed("whole") == untimed("looped")


def test_an_incomplete_import_is_not_restarted_from_random_weights(capsys):
    assert run(f"{TINY} --out imported") == 0
    shutil.rmtree("imported/checkpoints")
    Path("imported/torch.pt").touch()
    capsys.readouterr()
    assert run(f"{TINY} --resume auto --out imported") == 2
    assert "imported was not imported completely" in capsys.readouterr().err


def test_a_run_repeated_from_config_json_is_bit_identical(capsys):
    settings = "--lr 2e-3 --seed 3 --accumulate 2 --optimizer sgd(momentum=0.9) --schedule linear"
    assert run(f"{TINY} {settings} --out first") == 0
    capsys.readouterr()
    assert run("train --from first/config.json --out second") == 0
    assert "bit-identical" not in capsys.readouterr().out
    assert same_bits("first", "second")
    assert untimed("first") == untimed("second")
    config = json.loads(Path("first/config.json").read_text())
    assert json.loads(Path("second/config.json").read_text())["settings"] == config["settings"]
    # Other flags override settings; differences of the environment are reported.
    config["versions"]["jax"] = "0.1"
    Path("first/config.json").write_text(json.dumps(config))
    assert run("train digits-mlp --from=first/config.json --out third --hidden 9 --seed 4 --steps 2") == 0
    printed = capsys.readouterr().out
    assert (
        f"first/config.json was written with jax 0.1, here {jax.__version__}: results may not be bit-identical"
        in printed
    )
    third = read_recipe(RunFolder(Path("third")))[1]
    assert (third.hidden, third.seed, third.optimizer) == (9, 4, "sgd(momentum=0.9)")
    for command, error in {
        "train --from first/config.json --out first": "first already holds a run",
        "train gpt-stdlib --from first/config.json": "first/config.json holds a run of digits-mlp, not of gpt-stdlib",
        "train --from nowhere.json": "nowhere.json cannot be read",
        "train --from": "--from needs a value",
        "train --resume sometimes": "--resume must be auto, or without a value, got 'sometimes'",
    }.items():
        assert run(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert error in err


def test_retention_settings_may_change_on_resume(capsys):
    kept = "--batch-size 16 --log-every 1 --eval-every 2 --save-every 1 --keep-last 1 --keep-best 0"
    command = f"train digits-mlp --hidden 8 {kept} --keep-every 4 --out kept"
    assert run(f"{command} --steps 6") == 0
    assert sorted(saved_steps(Path("kept/checkpoints"))) == [4, 6]
    assert run("train --resume --out kept --steps 9 --keep-best 1 --keep-last 2") == 0
    best = min((m for m in lines("kept") if "eval_loss" in m and m["step"] >= 4), key=lambda m: m["eval_loss"])
    assert set(saved_steps(Path("kept/checkpoints"))) == {4, 8, 9, best["step"]}
    capsys.readouterr()
    assert run("train --resume --out kept --keep-last 0") == 2
    assert "keep_last must be at least 1, got 0" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_restored(capsys):
    assert run(f"{TINY} --out whole") == 0
    assert run(f"{TINY} --out hurt") == 0
    (data,) = Path("hurt/checkpoints/6/state/d").iterdir()
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    for command in ("train --resume --out whole", "train --resume auto --out hurt"):
        assert run(f"{command} --steps 6") == 0
    printed = capsys.readouterr().out
    assert f"step 6 is damaged (state/d/{data.name} does not match its checksum): moved to" in printed
    assert "resuming hurt at step 4" in printed
    assert same_bits("whole", "hurt")
    assert untimed("whole") == untimed("hurt")
    for step in saved_steps(Path("hurt/checkpoints")):
        Path(f"hurt/checkpoints/{step}/run.json").unlink()
    for command in ("train --resume --out hurt", "train --resume auto --out hurt"):
        assert run(command) == 2
        assert "hurt has no intact checkpoint left" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_and_unchanged(capsys):
    assert run(f"{TINY} --out used") == 0
    with RunLock(Path("used")) as lock:
        lock.take()
        before = {p: p.read_bytes() for p in Path("used").rglob("*") if p.is_file()}
        for how in ("--resume", "--resume auto"):
            assert run(f"train {how} --out used --steps 8") == 2
            assert f"used is in use by pid {os.getpid()} on {os.uname().nodename}" in capsys.readouterr().err
        assert {p: p.read_bytes() for p in Path("used").rglob("*") if p.is_file()} == before
    assert run("train --resume --out used --steps 8") == 0


def test_a_report_that_cannot_be_written_does_not_affect_the_run(capsys):
    Path("full/report.html").mkdir(parents=True)
    assert run(f"{TINY} --out full") == 1
    assert capsys.readouterr().err == (
        "jaxtrain: full/report.html cannot be written (Is a directory): the run is saved at step 6\n"
    )
    Path("full/report.html").rmdir()
    assert run(f"{TINY} --resume auto --out full") == 0
    assert Path("full/report.html").is_file()


def test_checkpoints_without_their_config_are_not_overwritten(capsys):
    assert run(f"{TINY} --out lost") == 0
    Path("lost/config.json").unlink()
    for how in ("", "--resume auto"):
        assert run(f"{TINY} {how} --out lost") == 2
        assert "lost has checkpoints but no config.json" in capsys.readouterr().err


BAD_FLAGS = {
    "train gpt-stdlb": "no recipe 'gpt-stdlb', did you mean 'gpt-stdlib'",
    "trian": "no command 'trian', did you mean 'train'",
    "train --data nowhere": "nowhere does not exist",
    "train --data empty": "empty has no readable text",
    "train --resume": "runs/gpt-stdlib holds no run",
    "train --resume --out fresh": "fresh holds no run",
    "train --n-head 3": "n_embd 128 is not divisible by n_head 3",
    "train --dropout 1": "dropout must be in [0, 1), got 1.0",
    "train --steps 0": "steps must be at least 1, got 0",
    "train --steps many": "many",
    "train --precision fp7": "fp7",
    "train --lr -1": "lr must be positive and representable in float32, got -1.0",
    "train --stepz 3": "--stepz",
    "train --out a_file": "a_file is a file",
    f"train --out {'a' * 300}": "is not a valid path (File name too long)",
    "sample": "the following arguments are required: DIR; see jaxtrain sample --help",
    "sample nowhere": "nowhere holds no run",
    "train --steps 1e3": "steps must be an integer, got '1e3': use 1000",
    "train --lr": "--lr",
    "train --data=": "--data is empty: give it a value, or leave it out",
}
BAD_DATA = {
    "train digits-mlp --data nowhere.npz": "nowhere.npz does not exist",
    "train digits-mlp --data empty": "empty has no sub-folders",
    "train digits-mlp --data outside.npz": "label 10 is outside 0..9",
    "train digits-mlp --classes 4": "is outside 0..3",
    "train digits-mlp --batch-size 10 --accumulate 4": "batch_size 10 is not divisible by accumulate 4",
    "train digits-mlp --batch-size 5000": "got 5000: use a smaller one",
}


def assert_refused(command, part, capsys):
    assert run(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert part in err


def test_bad_flags_are_a_one_line_error_with_exit_status_2_and_write_nothing(capsys):
    Path("empty").mkdir()
    Path("a_file").touch()
    before = sorted(Path().rglob("*"))
    for command, part in BAD_FLAGS.items():
        assert_refused(command, part, capsys)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("command", BAD_DATA, ids=lambda c: c.replace(" ", "_"))
def test_bad_data_is_a_one_line_error_with_exit_status_2_and_writes_nothing(command, capsys):
    Path("empty").mkdir()
    np.savez("outside.npz", x=np.zeros((20, 4, 4), np.uint8), y=np.array([0, 1, 2, 10] * 5))
    before = sorted(Path().rglob("*"))
    assert_refused(command, BAD_DATA[command], capsys)
    assert sorted(Path().rglob("*")) == before


def test_a_folder_with_a_run_is_never_overwritten(capsys):
    assert run(f"train digits-mlp --steps 2 --hidden 8 {SMALL} --out mine") == 0
    before = {p: p.read_bytes() for p in Path("mine").rglob("*") if p.is_file()}
    capsys.readouterr()
    for command in (
        "train digits-mlp --out mine",
        "train --out mine",
        "train gpt-stdlib --resume --out mine",
        "train --resume --out mine --lr 1",
        "sample mine",
    ):
        assert run(command) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert {p: p.read_bytes() for p in Path("mine").rglob("*") if p.is_file()} == before


def test_a_damaged_config_is_a_one_line_error(capsys):
    assert run(f"train digits-mlp --steps 2 --hidden 8 {SMALL} --out mine") == 0
    capsys.readouterr()
    Path("mine/config.json").write_text("{")
    assert run("train --resume --out mine") == 2
    assert "mine/config.json cannot be read" in capsys.readouterr().err


def test_ctrl_c_in_a_real_process_saves_and_exits_130(tmp_path):
    command = [sys.executable, "-m", "jaxtrain.cli", "train", "digits-mlp", "--steps", "100000", "--hidden", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for line in process.stdout:
            if line.startswith("step 20/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130
    assert "stopped and saved at step" in rest
    assert lines(str(tmp_path / "runs/digits-mlp"))[-1]["step"] >= 20


def test_every_recipe_has_a_docstring():
    for recipe in RECIPES.values():
        assert type(recipe).__doc__


def test_a_flag_may_be_spelled_with_underscores():
    options, rest = parse_known(Train(), ["--micro_batch", "auto", "--batch_size", "8"], "jaxtrain train")
    assert (options.micro_batch, rest) == ("auto", ["--batch-size", "8"])


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        run("train --help")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--steps", "--batch-size", "--accumulate", "--precision", "--remat", "--out", "--resume", "--data"):
        assert flag in out
    assert run("--help") == 0
    assert "train" in capsys.readouterr().out
