"""`--ema` and `--frozen` in every command: the average is evaluated and exported, frozen parameters do not change."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.cli.export import Restored
from jaxtrain.run import load_recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_params, restore_state
from jaxtrain.step import averaged
from tests.cli.curve import CURVE, run, train_curve

SETTINGS = "--ema 0.75 --frozen hid*,bias"
WITH_BIAS = CURVE.replace('{"hidden": hidden,', '{"hidden": hidden, "bias": jnp.ones(()),').replace(
    '@ params["out"]\n', '@ params["out"] + params["bias"]\n'
)


pytestmark = pytest.mark.usefixtures("broadcasting")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder that holds curve.py and its run."""
    return train_curve(tmp_path_factory.mktemp("averaged"), WITH_BIAS, SETTINGS)


@pytest.fixture(scope="module")
def state(trained):
    recipe = read_recipe(RunFolder(trained / "run"))[1]
    return restore_state(trained / "run" / "checkpoints", recipe, recipe.task())


def validation_loss(folder, params):
    data = read_recipe(RunFolder(folder))[1].task().validation
    predicted = np.tanh(np.float32(data["x"]) @ params["hidden"]) @ params["out"] + params["bias"]
    return float(((predicted - data["y"]) ** 2).mean())


def test_evaluations_are_those_of_the_moving_average(trained, state, monkeypatch, capsys):
    last = json.loads((trained / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] == pytest.approx(validation_loss(trained / "run", averaged(state).params), rel=1e-5)
    assert abs(last["eval_loss"] - validation_loss(trained / "run", state.params)) > 1e-3
    monkeypatch.chdir(trained)
    assert run("eval run --json metrics.json") == 0
    assert json.loads(Path("metrics.json").read_text())["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)


def test_the_average_is_that_of_a_loop_and_frozen_parameters_keep_their_values(trained):
    seen = []
    recipe = replace(load_recipe(f"{trained}/curve.py::Curve")[1], ema=0.75, frozen="hid*,bias")
    done = jt.fit(
        recipe,
        trained / "loop",
        quiet=True,
        on_step=lambda step, metrics, state: seen.append(jax.tree.map(np.array, state.params)),
    )
    average = seen[0]["out"]
    for params in seen[1:]:
        average = average + np.float32(0.25) * (params["out"] - average)
    assert (done.state.ema["hidden"], done.state.ema["bias"]) == (None, None)
    restored = restore_params(trained / "loop" / "checkpoints", done.state.params, average=done.state.ema)
    for params in (done.state.ema, restored, averaged(done.state).params):
        np.testing.assert_allclose(params["out"], average, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, restored, averaged(done.state).params)
    again = restore_state(trained / "loop" / "checkpoints", recipe, recipe.task())
    jax.tree.map(np.testing.assert_array_equal, again._replace(rng=0), done.state._replace(rng=0))
    initial = recipe.task().params
    for name in ("hidden", "bias"):
        np.testing.assert_array_equal(seen[-1][name], initial[name])
    assert (seen[-1]["out"] != initial["out"]).all()
    moments = [leaf.shape for leaf in jax.tree.leaves(done.state.opt_state) if leaf.shape]
    assert moments == [(8,), (8,)]  # of "out" alone


def test_a_resumed_run_has_the_same_average(trained, state):
    recipe = read_recipe(RunFolder(trained / "run"))[1]

    def interrupt(step, metrics, state):
        if step == 5:
            signal.raise_signal(signal.SIGINT)

    assert jt.fit(recipe, trained / "parts", quiet=True, on_step=interrupt).exit_status == 130
    resumed = jt.fit(recipe, trained / "parts", quiet=True, resume=True).state
    for name in ("params", "ema", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(resumed, name), getattr(state, name))
    with pytest.raises(jt.UserError, match=r"ema=0\.5 differs from the run's 0\.75"):
        jt.fit(replace(recipe, ema=0.5), trained / "parts", quiet=True, resume=True)


def test_exports_and_samples_have_the_moving_average(trained, state):
    folder = RunFolder(trained / "run")
    name, recipe = read_recipe(folder)
    weights = Restored(folder, name, recipe, recipe.task(), state, trained / "out").inference().weights
    np.testing.assert_array_equal(weights["out"], state.ema["out"])
    params = restore_params(folder.checkpoints, state.params, average=state.ema)
    jax.tree.map(np.testing.assert_array_equal, params, averaged(state).params)
    assert (np.asarray(state.ema["out"]) != np.asarray(state.params["out"])).all()


def test_train_prints_the_average_and_the_frozen_parameters(trained, capsys):
    assert run(f"train {trained}/curve.py::Curve --steps 1 --out {trained}/loud {SETTINGS}") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "moving average of the parameters, decay 0.75" in out
    assert "33 in float32, 0.0 MiB, 25 frozen" in out


def test_plan_and_replay_accept_both_settings(trained, capsys):
    assert run(f"plan {trained}/curve.py::Curve --memory 1GiB --json {SETTINGS}") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"].endswith("--frozen 'hid*,bias' --ema 0.75")
    assert run(f"replay {trained}/run 7") == 0
    assert "all values are finite" in capsys.readouterr().out


def test_a_run_with_frozen_parameters_continues_in_pytorch(tmp_path, state):
    torch = pytest.importorskip("torch")
    file = tmp_path / "curve.py"
    file.write_text(CURVE)
    assert run(f"train {file}::Curve --out {tmp_path}/run --quiet --ema 0.75 --frozen hidden") == 0
    assert run(f"export {tmp_path}/run --format torch --out {tmp_path}/run.pt") == 0
    saved = torch.load(tmp_path / "run.pt")
    trained = read_recipe(RunFolder(tmp_path / "run"))[1]
    ours = restore_params(tmp_path / "run" / "checkpoints", trained.task().params)
    np.testing.assert_array_equal(saved["model"]["out"].numpy(), ours["out"])
    hidden, out = torch.nn.Parameter(torch.zeros(8, 3), requires_grad=False), torch.nn.Parameter(torch.zeros(8))
    groups = saved["optimizer"]["param_groups"]
    assert len(saved["optimizer"]["state"]) == 1
    order = {name: i for i, name in enumerate(saved["model"])}
    named = {order["hidden.weight"]: hidden, order["out"]: out}
    optimizer = torch.optim.AdamW([{"params": [named[i] for i in group["params"]]} for group in groups])
    optimizer.load_state_dict(saved["optimizer"])
    assert [*optimizer.state] == [out]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--ema 1", "ema must be in [0, 1), got 1.0: 0.999 averages about the last 1000 updates"),
        ("--frozen hid*,biass", "frozen pattern 'biass' matches no parameter: the paths are bias, hidden, out"),
        ("--frozen *", "no parameter is trained, frozen matches all of them: leave at least one to train"),
    ],
)
def test_a_wrong_setting_is_a_one_line_error(settings, message, trained, capsys):
    assert run(f"train {trained}/curve.py::Curve --out {trained}/wrong --quiet {settings}") == 2
    assert capsys.readouterr().err == f"jaxtrain: {message}\n"
    assert not (trained / "wrong").exists()
