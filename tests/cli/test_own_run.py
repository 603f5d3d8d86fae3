"""Every command on a user's own recipe, FILE.py::NAME."""

import hashlib
import importlib
import inspect
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.recipes import RECIPES
from jaxtrain.run import load_recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe
from jaxtrain.runner.checkpoint import restore_params, saved_steps
from tests.cli.curve import CURVE, run, train_curve

TWO = f"{CURVE}\n\n@dataclass(frozen=True, kw_only=True)\nclass Second(Curve):\n    pass\n"

pytestmark = pytest.mark.usefixtures("broadcasting")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder that holds curve.py and its run."""
    return train_curve(tmp_path_factory.mktemp("own"), CURVE)


@pytest.fixture
def here(trained):
    """Copy the run, but not its file, to the working folder."""
    shutil.copytree(trained / "run", "run")
    return Path("run")


def test_a_run_records_its_file(trained):
    folder = RunFolder(trained / "run")
    config = json.loads(folder.config.read_text())
    assert config["recipe"] == f"{trained}/curve.py::Curve"
    assert config["source"] == {
        "file": str(trained / "curve.py"),
        "sha256": hashlib.sha256(CURVE.encode()).hexdigest(),
    }
    assert config["settings"]["width"] == 8
    assert folder.source.read_text() == CURVE
    losses = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert losses[-1]["eval_loss"] < losses[0]["eval_loss"]


def test_a_resumed_run_prints_what_changed_in_its_file(here, capsys):
    changed = CURVE.replace("np.sin", "np.cos").replace("    log_every: int = 4\n", "")
    Path("moved.py").write_text(changed)
    assert run(f"train moved.py::Curve --resume --out {here} --steps 16") == 0
    message = next(line for line in capsys.readouterr().out.splitlines() if "changed" in line)
    what, _, changes = message.partition(": ")
    assert what == "moved.py has changed since the run used it"
    assert changes == "1 line added, 2 removed; line 24, 'log_every: int = 4', was removed"
    assert max(saved_steps(here / "checkpoints")) == 16
    assert RunFolder(here).source.read_text() == changed
    assert read_recipe(RunFolder(here))[0] == "moved.py::Curve"
    assert run(f"train --resume --out {here} --steps 17") == 0  # the new place is recorded
    assert "changed" not in capsys.readouterr().out


def test_a_resumed_run_whose_shapes_changed_is_refused_in_one_line(here, capsys):
    Path("moved.py").write_text(CURVE.replace("(3, self.width)", "(3, self.width + 1)"))
    before = RunFolder(here).config.read_text()
    assert run(f"train moved.py::Curve --resume --out {here} --steps 16") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "float32[3, 8]" in message
    assert message.endswith("has changed since: undo that, or start a new run with another --out")
    assert RunFolder(here).config.read_text() == before
    assert RunFolder(here).source.read_text() == CURVE


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("train --resume --out run", "jaxtrain train NEW.py::Curve --resume --out run"),
        ("eval run", "jaxtrain train NEW.py::Curve --resume --out run"),
        ("train --from run/config.json --out other", "jaxtrain train NEW.py::Curve --from run/config.json"),
    ],
)
def test_a_missing_file_is_a_one_line_error_with_the_remedy(here, command, remedy, capsys):
    config = json.loads(RunFolder(here).config.read_text())
    config["source"]["file"] = "/nowhere/curve.py"
    RunFolder(here).config.write_text(json.dumps(config))
    assert run(command) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("jaxtrain: /nowhere/curve.py, the recipe of run/config.json, does not exist")
    assert message.endswith(remedy)


def test_a_run_is_repeated_from_its_config_with_a_file_that_moved(here, capsys):
    Path("moved.py").write_text(CURVE)
    assert run(f"train moved.py::Curve --from {here}/config.json --steps 4 --out again --quiet") == 0
    again = read_recipe(RunFolder(Path("again")))
    assert again[0] == "moved.py::Curve"
    assert again[1].steps == 4
    first, second = (Path(folder, "metrics.jsonl").read_text().splitlines()[0] for folder in (here, "again"))
    assert json.loads(first)["eval_loss"] == json.loads(second)["eval_loss"]
    Path("moved.py").write_text(CURVE.replace("class Curve", "class Other"))
    assert run(f"train moved.py::Other --resume --out {here}") == 2
    assert "holds a run of" in capsys.readouterr().err


def test_fields_that_a_recipe_no_longer_has_are_named_and_new_ones_have_their_defaults(here, capsys):
    Path("moved.py").write_text(CURVE.replace("    width: int = 8", "    units: int = 8").replace("self.width", "8"))
    assert run(f"train moved.py::Curve --resume --out {here}") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message == (
        "jaxtrain: Curve has no field width, which run/config.json sets: add it to the recipe again, or "
        "delete it from config.json"
    )
    Path("moved.py").write_text(CURVE.replace("    steps: int = 12", "    units: int = 5\n    steps: int = 12"))
    assert run(f"train moved.py::Curve --resume --out {here} --steps 13 --quiet") == 0
    assert read_recipe(RunFolder(here))[1].units == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("class Curve(jt.Recipe)", "class Curve(jt.Recipe"), "SyntaxError"),
        (('"y": y[:32]', '"y": y["a"]'), "IndexError: only integers, slices"),
        (('params["hidden"])', 'params["other"])'), "KeyError: 'other'"),
    ],
)
def test_an_error_of_a_users_file_is_shown_from_its_first_line_on(change, expected, capsys):
    source = CURVE.replace(*change)
    number = source.partition(change[1])[0].count("\n") + 1
    Path("own.py").write_text(source)
    assert run("train own.py::Curve --out new") == 1
    err = capsys.readouterr().err
    assert expected in err
    first = next(line for line in err.splitlines() if line.startswith("  File "))
    assert "own.py" in first
    assert f"line {number}" in err
    assert "/jaxtrain/" not in err
    assert "importlib" not in err
    assert not Path("new/config.json").exists()


def params_of(folder: Path):
    return restore_params(folder / "checkpoints", read_recipe(RunFolder(folder))[1].task().params)


def curve(params, x):
    """Return what the file's `predict` computes."""
    return np.tanh(np.float32(x) @ params["hidden"]) @ params["out"]


def validation_data(folder: Path):
    return read_recipe(RunFolder(folder))[1].task().validation


def test_help_has_the_docs_of_a_users_fields(trained, capsys):
    with pytest.raises(SystemExit):
        run(f"train {trained}/curve.py::Curve --help")
    out = capsys.readouterr().out
    for expected in ("A curve through noisy points.", "--width INT", "Units of the hidden layer. (default: 8)"):
        assert expected in out
    assert "--optimizer STR" in out


def test_eval_lists_the_outputs_of_a_predict_without_classes(here, capsys):
    assert run("eval run --worst 2 --json metrics.json") == 0
    summary = json.loads(Path("metrics.json").read_text())
    last = json.loads(RunFolder(here).metrics.read_text().splitlines()[-1])
    assert summary["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert "calibration" not in summary
    examples = [json.loads(line) for line in (here / "eval/step-12-validation.jsonl").read_text().splitlines()]
    data = validation_data(here)
    expected = curve(params_of(here), data["x"])
    np.testing.assert_allclose([example["prediction"] for example in examples], expected, rtol=1e-5)
    losses = (expected - data["y"]) ** 2
    np.testing.assert_allclose([example["loss"] for example in examples], losses, rtol=1e-4)
    assert [example["index"] for example in summary["worst"]] == np.argsort(-losses)[:2].tolist()
    worst = int(losses.argmax())
    assert f"{worst}  loss {losses[worst]:7.3f}  predicted {expected[worst]:.4g}" in capsys.readouterr().out
    assert f"predicted {expected[worst]:.4g}" in (here / "eval/step-12-validation.html").read_text()
    assert run("eval run --split train") == 0
    assert len((here / "eval/step-12-train.jsonl").read_text().splitlines()) == 32


def test_plan_compiles_a_users_step(trained, capsys):
    assert run(f"plan {trained}/curve.py::Curve --width 16 --memory 1GiB --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["peak_bytes"] > 4 * 3 * (3 * 16 + 16)  # params and two moments
    assert found["command"] == f"jaxtrain train {trained}/curve.py::Curve --width 16"


def test_profile_traces_a_users_step(here, capsys):
    assert run("profile run --steps 2") == 0
    out = capsys.readouterr().out
    assert "ms per step" in out
    assert list((here / "profile").rglob("*.xplane.pb"))


def test_replay_reruns_a_users_step(here, capsys):
    assert run("replay run 7") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "starting at step 4: 2 steps to rerun before step 7"
    assert out[-1] == "all values are finite, and so is every operation in float64"


def test_report_shows_a_users_run(here, capsys):
    assert run("report run --out page.html") == 0
    best = min(json.loads(line)["eval_loss"] for line in RunFolder(here).metrics.read_text().splitlines())
    assert f"best validation loss {best:.4f}" in capsys.readouterr().out
    assert "curve.py::Curve" in Path("page.html").read_text()


def test_sample_prints_the_sample_of_a_task(here, capsys):
    assert run("sample run --seed 3") == 0
    assert capsys.readouterr().out == "seed 3: (8,)\n"


def test_export_onnx_has_the_inputs_that_predict_reads(here, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert run("export run --format onnx --out run.onnx") == 0
    assert "x float32[batch, 3] → logits, in batches of 1, 3 and 8" in capsys.readouterr().out
    session = onnxruntime.InferenceSession("run.onnx")
    assert [x.name for x in session.get_inputs()] == ["x"]
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    (got,) = session.run(None, {"x": x})
    np.testing.assert_allclose(got, curve(params_of(here), x), rtol=1e-5)


def test_export_fixes_a_batch_size_that_predict_needs_as_a_number(here, capsys):
    pytest.importorskip("onnxruntime")
    Path("moved.py").write_text(CURVE.replace('@ params["out"]\n', '@ params["out"] * float(len(batch["x"]) > 0)\n'))
    assert run("train moved.py::Curve --resume --out run --quiet") == 0
    assert run("export run --format onnx --out run.onnx") == 0
    out = capsys.readouterr().out
    assert "x float32[8, 3] → logits, in batches of 8" in out
    assert "the batch size is fixed, because predict cannot be traced with any (TypeError" in out


def test_export_stablehlo_computes_what_predict_does(here, capsys):
    pytest.importorskip("flatbuffers")
    assert run("export run --format stablehlo --out program") == 0
    assert "x float32[batch, 3] → logits, in batches of 1, 3 and 8" in capsys.readouterr().out
    x = np.ones((2, 3), np.float32)
    logits = runpy.run_path("program/load.py")["logits"](x)
    np.testing.assert_allclose(logits, curve(params_of(here), x), rtol=1e-5)


def test_a_users_run_continues_in_pytorch_and_back(here, trained, capsys):
    torch = pytest.importorskip("torch")
    assert run("export run --format torch --out run.pt") == 0
    ours = params_of(here)
    theirs = torch.load("run.pt")["model"]
    np.testing.assert_array_equal(theirs["hidden.weight"].numpy().T, ours["hidden"])
    assert run(f"import-torch run.pt --model {trained}/curve.py --schedule constant --out back") == 0
    assert f"jaxtrain train {trained}/curve.py::Curve --resume --out back --steps 24" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, params_of(Path("back")), ours)
    assert run("train --resume --out back --steps 13 --quiet") == 0


def test_a_mesh_trains_a_users_run_as_one_device_does(trained):
    assert run(f"train {trained}/curve.py::Curve --mesh data=2,fsdp=2 --out sharded --quiet") == 0
    one, four = (RunFolder(folder).metrics.read_text().splitlines() for folder in (trained / "run", Path("sharded")))
    for a, b in zip(map(json.loads, one), map(json.loads, four), strict=True):
        assert b["eval_loss"] == pytest.approx(a["eval_loss"], rel=1e-5)


def test_launch_trains_a_users_run_in_two_processes(trained):
    command = f"launch -n 2 -- train {trained}/curve.py::Curve --mesh data=2 --out launched --quiet"
    subprocess.run([sys.executable, "-m", "jaxtrain.cli", *command.split()], check=True, capture_output=True)
    one, two = (
        RunFolder(folder).metrics.read_text().splitlines()[-1] for folder in (trained / "run", Path("launched"))
    )
    assert json.loads(two)["eval_loss"] == pytest.approx(json.loads(one)["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("command", "field", "remedy"),
    [
        ("eval run --split train", "predict=predict", "and this task of moved.py::Curve has no `predict`: omit them"),
        ("export run --format onnx", "predict=predict", "define Task.predict"),
        ("export run --format torch", "names=NameTable", "define Task.names, or use another format"),
        ("export run --format huggingface", "", "export it as onnx, stablehlo or torch"),
        ("sample run", "sample=lambda", "define Task.continue_text or Task.sample, or use a run of a language model"),
    ],
)
def test_a_command_that_needs_a_field_of_the_task_says_so_in_one_line(here, command, field, remedy, capsys):
    lines = [line for line in CURVE.splitlines() if not field or field not in line]
    Path("moved.py").write_text("\n".join(lines))
    assert run("train moved.py::Curve --resume --out run --quiet") == 0
    capsys.readouterr()
    assert run(command) == 2
    announced, message = capsys.readouterr().err.splitlines()
    assert announced == f"jaxtrain: running {Path('moved.py').resolve()}"
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("replay own.py::Curve 3", "own.py::Curve is a recipe, not the folder of a run: give one, such as runs/Curve"),
        ("eval own.py::Curve", "own.py::Curve is a recipe, not the folder of a run: give one, such as runs/Curve"),
        ("eval run --worst x", "--worst must be an integer, got 'x'; see jaxtrain eval run --help"),
        ("launch train own.py::Curve", "the command is not separated by --: use jaxtrain launch -n 2 -- train …"),
        (
            "plan own.py::Curve --memory 4",
            "'4' is not an amount of memory: write it with its unit, as in 16GiB or 40GB",
        ),
    ],
)
def test_a_mistake_with_another_command_is_one_line_with_the_remedy(command, expected, capsys):
    Path("own.py").write_text(CURVE)
    assert run(command) == 2
    assert capsys.readouterr().err == f"jaxtrain: {expected}\n"


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        (None, "Curve", "own.py does not exist: give FILE.py::NAME"),
        (TWO, "", "own.py defines the recipes Curve, Second: name one of them, as in own.py::Second"),
        (CURVE, "Other", "own.py defines no recipe 'Other', Curve is defined there: use FILE.py::NAME"),
        ("x = 1", "x", "own.py defines no recipe 'x', no subclass of jaxtrain.Recipe is defined there"),
        ("class Curve:\n    pass", "Curve", "no subclass of jaxtrain.Recipe is defined there"),
        (CURVE.replace("@dataclass", "# @dataclass"), "Curve", "is not a dataclass: decorate it with @dataclass("),
        (CURVE.replace("width: int = 8", "width: int"), "Curve", "has fields without defaults (width): give each"),
        (CURVE.partition("    def task")[0], "Curve", "Curve has no task: define `def task(self) -> jaxtrain.Task`"),
    ],
)
def test_an_invalid_recipe_is_a_one_line_error(source, name, expected, capsys):
    if source is not None:
        Path("own.py").write_text(source)
    assert run(f"train own.py::{name} --out new --quiet") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert expected in message
    assert not Path("new/config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("own.py:Curve", "no recipe 'own.py:Curve', did you mean 'own.py::Curve': choose one of "),
        ("own.py::Curve --widht 3", "unrecognized arguments: --widht 3, did you mean --width; see "),
        ("own.py::Curve --widht 3 --acumulate 2", ", did you mean --accumulate and --width; see "),
        ("own.py::Curve --epochs 3", "unrecognized arguments: --epochs 3; see jaxtrain train own.py::Curve --help"),
        ("own.py::Curve --width 3.5", "--width must be an integer, got '3.5'; see jaxtrain train own.py::Curve --help"),
        ("own.py::Curve --lr fast", "--lr must be a number, got 'fast'; see jaxtrain train own.py::Curve --help"),
        ("own.py::Curve --steps 1e3", "--steps must be an integer, got '1e3': use 1000; see "),
        ("own.py::Curve --batch-size 100", "batch_size must be at most the number of examples, 32, got 100: use a"),
        ("own.py::Curve --frozen hiden", "frozen pattern 'hiden' matches no parameter: the paths are hidden, out"),
        ("own.py::Curve --optimizer adamw(lr=0.1)", "adamw has no argument lr: use one of learning_rate, b1, "),
        ("own.py::Curve --mesh data=3", "mesh 'data=3' has 3 devices, got 4: make its sizes multiply to 4"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_remedy(arguments, expected, capsys):
    Path("own.py").write_text(CURVE)
    assert run(f"train {arguments} --out new --quiet") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert expected in message
    assert not Path("new").exists()


def test_new_writes_a_run_that_its_printed_command_trains(capsys):
    assert run("new mine.py") == 0
    *_, command = capsys.readouterr().out.splitlines()
    assert command == "jaxtrain train mine.py::Spirals"
    settings = "--steps 60 --log-every 30 --eval-every 30 --out run --quiet"
    assert run(f"{command.removeprefix('jaxtrain ')} {settings}") == 0
    first, *_, last = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert first["eval_loss"] > 1
    assert last["eval_accuracy"] > 0.8
    assert run("eval run --worst 1") == 0
    assert "x = " in capsys.readouterr().out
    assert run("new mine.py") == 2
    assert capsys.readouterr().err == "jaxtrain: mine.py already exists: choose another name\n"


@pytest.mark.parametrize("name", RECIPES)
def test_new_copies_a_built_in_recipe(name, capsys):
    assert run(f"new copied.py --from {name}") == 0
    reference = capsys.readouterr().out.split()[-1]
    complete, copy = load_recipe(reference)
    assert complete == reference
    assert vars(copy) == vars(RECIPES[name])
    assert type(copy) is not type(RECIPES[name])
    assert inspect.getfile(type(copy)) == str(Path("copied.py").resolve())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("new", "a file is required"),
        ("new mine.txt", "mine.txt is not a Python file"),
        ("new nowhere/mine.py", "nowhere/mine.py cannot be written (No such file or directory)"),
        ("new mine.py --from digits", "no recipe 'digits', did you mean 'digits-"),
        ("new mine.py --from other.py", "--from other.py is a file already"),
    ],
)
def test_new_refuses_invalid_arguments_in_one_line(command, expected, capsys):
    assert run(command) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert expected in message
    assert not Path("mine.py").exists()


def test_files_beside_a_users_run_replace_no_module_that_is_imported_later(tmp_path):
    (tmp_path / "wave.py").write_text("raise RuntimeError('not the library module')\n")
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nimport jaxtrain as jt\nfrom neighbour import WIDTH\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(jt.Recipe):\n    width: int = WIDTH\n"
    )
    assert load_recipe(f"{tmp_path / 'mine.py'}::Mine")[1].width == 3
    sys.modules.pop("wave", None)
    assert importlib.import_module("wave").open
