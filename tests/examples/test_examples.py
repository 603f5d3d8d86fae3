"""Every example as a user runs it: trained, interrupted or killed and resumed, and read by the other commands."""

import itertools
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
import jaxtrain.cli
from jaxtrain.run import load_recipe
from jaxtrain.runner.checkpoint import saved_steps
from tests.soak.fork_server import fork_server

FOLDER = Path(__file__).parents[2] / "examples"
STEPS, STOP = 6, 3
OFTEN = {"steps": STEPS, "log_every": 2, "eval_every": 2, "save_every": 4}
# Settings that make a run tiny, by FILE::NAME; the first examples run by default.
EXAMPLES = {
    "linen_vae.py::VAE": {"hidden": 8, "latent": 2, "batch_size": 8},
    "gan.py::Ring": {"width": 8, "batch_size": 16},
    "equinox_regression.py::Diabetes": {"width": 8, "depth": 1, "batch_size": 16},
    "diffusion.py::Diffusion": {"width": 8, "blocks": 1, "times": 4, "batch_size": 8},
    "two_tower.py::Docstrings": {"width": 8, "batch_size": 16},
    "growing_folder.py::GrowingFolder": {"width": 8, "layers": 1, "seq_len": 16, "batch_size": 4},
}
# What the default settings reach: the metric of the last evaluation, and its least and largest value.
RESULTS = {
    "equinox_regression.py::Diabetes": ("eval_r2", 0.34, 0.40),
    "linen_vae.py::VAE": ("eval_loss", 22.3, 23.1),
    "diffusion.py::Diffusion": ("eval_loss", 0.21, 0.24),
    "gan.py::Ring": ("eval_near", 0.7, 1.0),
    "two_tower.py::Docstrings": ("eval_top5", 0.38, 0.5),
    "growing_folder.py::GrowingFolder": ("bits_per_byte", 3.1, 3.7),
}
SHORT = {"equinox_regression.py::Diabetes", "linen_vae.py::VAE"}
# Python code by which a run kills itself.
KILLS = {
    "after step 5": """
import os, signal
from jaxtrain.runner.events import Events
step = Events.step
def killing(self, i, metrics, state):
    step(self, i, metrics, state)
    if i == 5:
        os.kill(os.getpid(), signal.SIGKILL)
Events.step = killing
""",
    "in the save of step 4": """
import os, signal
from jaxtrain.runner import checkpoint
write = checkpoint.write_manifest
def killing(folder):
    write(folder)
    if folder.name.startswith("4"):
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.write_manifest = killing
""",
}


def load(example, **settings):
    return replace(load_recipe(f"{FOLDER}/{example}")[1], **settings)


def tiny(example):
    return load(example, **OFTEN, **EXAMPLES[example])


def interrupt(step, metrics, state):
    if step == STOP:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fork_server(tmp_path_factory.mktemp("killed")) as started:
        yield started


def flags(settings):
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def bits(tree):
    keys = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(keys(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def logged(run):
    """Return the lines of a log without the times."""
    names = {"step", "loss", "grad_norm", "lr", *(name for line in run.history for name in line if "eval_" in name)}
    return [{name: value for name, value in line.items() if name in names} for line in run.history]


def test_every_example_with_a_recipe_is_tested():
    recipes = {path.name: path for path in FOLDER.glob("*.py") if "jt.Recipe" in path.read_text()}
    assert recipes.keys() == {example.partition("::")[0] for example in EXAMPLES}
    assert recipes.keys() == {example.partition("::")[0] for example in RESULTS}
    assert all(len(path.read_text().splitlines()) < 110 for path in recipes.values())


all_examples = pytest.mark.parametrize("example", EXAMPLES)


# Killed runs are resumed of every example.
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.nightly] * (i > 0)) for i, name in enumerate(EXAMPLES)]
)
def test_an_example_interrupted_and_resumed_equals_the_uninterrupted_run(example, chain, tmp_path):
    run = chain(example)
    stopped = jt.fit(run.recipe, tmp_path / "run", quiet=True, on_step=interrupt)
    assert (stopped.exit_status, int(stopped.state.step)) == (130, STOP)
    resumed = jt.fit(run.recipe, tmp_path / "run", quiet=True, resume=True)
    assert bits(resumed.state) == bits(run.whole.state)
    assert logged(resumed) == logged(run.whole)
    assert resumed.sample == run.whole.sample


@pytest.mark.parametrize(("example", "kill"), [*zip(EXAMPLES, itertools.cycle(KILLS), strict=False)])
def test_an_example_killed_and_resumed_equals_the_uninterrupted_run(example, kill, chain, server, tmp_path):
    run = chain(example)
    settings = " ".join(flags(OFTEN | EXAMPLES[example]))
    child = server.start(f"train {FOLDER}/{example} --out {tmp_path}/run --quiet {settings}", KILLS[kill])
    assert child.wait() == -signal.SIGKILL, child.text
    assert (run.whole.exit_status, int(run.whole.state.step)) == (0, STEPS)
    assert [line["step"] for line in run.whole.history] == [0, 2, 4, 6]
    assert STEPS not in saved_steps(tmp_path / "run" / "checkpoints")
    resumed = jt.fit(run.recipe, tmp_path / "run", quiet=True, resume=True)
    assert bits(resumed.state) == bits(run.whole.state)
    assert logged(resumed) == logged(run.whole)


@all_examples
def test_replay_repeats_a_step_of_an_example(example, chain, capsys):
    assert jaxtrain.cli.main(["replay", str(chain(example).whole.run.path), str(STEPS)]) == 0
    assert "all values are finite" in capsys.readouterr().out


@all_examples
def test_report_shows_an_example(example, chain, capsys):
    run = chain(example).whole.run
    run.report.unlink()
    assert jaxtrain.cli.main(["report", str(run.path)]) == 0
    assert f"step {STEPS}" in capsys.readouterr().out
    assert example in run.report.read_text()


@all_examples
def test_plan_finds_settings_for_an_example(example, capsys):
    settings = flags(EXAMPLES[example])
    assert jaxtrain.cli.main(["plan", f"{FOLDER}/{example}", "--memory", "4GiB", *settings]) == 0
    assert f"jaxtrain train {FOLDER}/{example}" in " ".join(capsys.readouterr().out.split())


@all_examples
def test_export_writes_the_predictions_of_an_example_or_refuses_in_one_line(example, chain, tmp_path, capsys):
    run = chain(example)
    status = jaxtrain.cli.main(
        ["export", str(run.whole.run.path), "--format", "stablehlo", "--out", str(tmp_path / "model")]
    )
    error = capsys.readouterr().err
    if run.recipe.task().predict is None:
        announced, message = error.splitlines()
        assert announced == f"jaxtrain: running {(FOLDER / example.partition('::')[0]).resolve()}"
        assert status == 2
        assert "predict" in message
    else:
        assert (status, (tmp_path / "model" / "load.py").exists()) == (0, True), error


@pytest.mark.parametrize("example", ["linen_vae.py::VAE", "diffusion.py::Diffusion"])
def test_sample_repeats_the_text_at_the_end_of_the_run(example, chain, capsys):
    run = chain(example).whole
    assert jaxtrain.cli.main(["sample", str(run.run.path)]) == 0
    assert capsys.readouterr().out == f"{run.sample}\n"


@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHORT)) for name in RESULTS],
)
def test_an_example_reaches_the_result_that_it_states(example, tmp_path):
    name, least, most = RESULTS[example]
    done = jt.fit(load(example), tmp_path / "run", quiet=True)
    assert least <= done.history[-1][name] <= most
