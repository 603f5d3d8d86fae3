"""`jaxtrain.fit` on a recipe written as a user would."""

import dataclasses
import importlib
import json
import signal
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.observe.notebook import NotebookConsole
from jaxtrain.runner import preflight
from jaxtrain.runner.checkpoint import saved_steps

EXAMPLES = 48


def squared_error(params, batch, rng):
    del rng
    residual = batch["x"] @ params["w"] - batch["y"]
    return jt.Loss.of(residual**2), {"bias": jt.Loss.of(residual)}


def examples():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return [{"x": row, "y": np.float32(row @ [1.0, -2.0, 0.5])} for row in x]


@dataclass(frozen=True, kw_only=True)
class Line(jt.Recipe):
    """A linear regression."""

    steps: int = 12
    batch_size: int = 8
    lr: float = 0.1
    save_every: int = 5
    log_every: int = 4
    eval_every: int = 4
    width: int = 3
    """Number of inputs."""

    def task(self):
        return jt.Task(init=lambda: {"w": jnp.zeros(self.width)}, loss_fn=squared_error, train=examples())

    def make_optimizer(self):
        return optax.sgd(self.lr, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Scored(Line):
    """A `Line` with a custom evaluation, whose accuracy rises until step 8."""

    def task(self):
        def evaluate(state, batches):
            seen = sum(int(batch["weight"].sum()) for batch in batches)
            step = int(state.step)
            return {"accuracy": min(step, 8) / 10, "seen": seen}

        return dataclasses.replace(
            super().task(), validation=examples()[:10], evaluate=evaluate, best_metric="accuracy", is_highest_best=True
        )


def same(one, two):
    return all(
        np.array_equal(jax.random.key_data(a), jax.random.key_data(b))
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
        else np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return jt.fit(Line(), tmp_path_factory.mktemp("whole") / "run", quiet=True)


def test_a_method_over_the_setting_optimizer_is_refused():
    with pytest.raises(jt.UserError, match=r"Mine\.optimizer is a setting: define the method as make_optimizer"):

        class Mine(jt.Recipe):
            def optimizer(self):
                return optax.sgd(0.1)


def test_fit_equals_a_loop_of_training_steps(whole):
    recipe = Line()
    task = recipe.task()
    step = jt.train_step(task.loss_fn, optax.sgd(0.1, momentum=0.9), clip_norm=recipe.clip_norm)
    state = step.init(task.params, seed=0)
    loader = jt.data.loader.Loader(task.train, 8, 0)
    losses = []
    for _ in range(12):
        state, metrics = step(state, next(loader))
        losses.append(float(metrics["loss"]))
    assert same(state.params, whole.state.params)
    assert same(state.opt_state, whole.state.opt_state)
    logged = [line["loss"] for line in whole.history if "loss" in line]
    np.testing.assert_allclose(logged, np.reshape(losses, (3, 4)).mean(1), rtol=1e-6)


def test_the_folder_holds_settings_metrics_checkpoints_and_report(whole):
    config = json.loads(whole.run.config.read_text())
    assert config["recipe"].endswith("test_fit.py::Line")
    assert config["settings"]["width"] == 3
    assert "optimizer" not in config["settings"]
    assert [line["step"] for line in whole.history] == [0, 4, 8, 12]
    assert sorted(saved_steps(whole.run.checkpoints)) == [5, 10, 12]
    assert "linear regression" in whole.run.report.read_text() or whole.run.report.stat().st_size > 10_000
    assert (whole.exit_status, whole.sample) == (0, None)


@pytest.mark.parametrize("at", [1, 6])
def test_a_run_stopped_by_ctrl_c_is_saved_and_resumes_to_the_same_bits(at, whole, tmp_path):
    def interrupt(step, metrics, state):
        if step == at:
            signal.raise_signal(signal.SIGINT)

    stopped = jt.fit(Line(), tmp_path / "run", quiet=True, on_step=interrupt)
    assert (stopped.exit_status, int(stopped.state.step)) == (130, at)
    resumed = jt.fit(Line(), tmp_path / "run", quiet=True, resume=True)
    assert resumed.exit_status == 0
    assert same(resumed.state, whole.state)
    assert [line.get("loss") for line in resumed.history] == [line.get("loss") for line in whole.history]


def test_events_see_every_step_evaluation_and_checkpoint(tmp_path):
    seen = {"step": [], "evaluation": [], "checkpoint": []}

    def on_step(step, metrics, state):
        seen["step"].append((step, int(state.step), float(metrics["loss"]) > 0))

    def on_checkpoint(step, path):
        assert (path / "manifest.json").exists()
        seen["checkpoint"].append(step)

    jt.fit(
        Scored(),
        tmp_path / "run",
        quiet=True,
        on_step=on_step,
        on_evaluation=[lambda step, metrics, state: seen["evaluation"].append((step, metrics["accuracy"]))],
        on_checkpoint=on_checkpoint,
    )
    assert seen["step"] == [(i, i, True) for i in range(1, 13)]
    assert seen["evaluation"] == [(0, 0.0), (4, 0.4), (8, 0.8), (12, 0.8)]
    assert seen["checkpoint"] == [5, 10, 12]


def test_an_exception_in_an_event_ends_the_run_saved(whole, tmp_path):
    def fail(step, metrics, state):
        if step == 7:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        jt.fit(Line(), tmp_path / "run", quiet=True, on_step=fail)
    assert max(saved_steps(tmp_path / "run" / "checkpoints")) == 7
    assert same(jt.fit(Line(), tmp_path / "run", quiet=True, resume="auto").state, whole.state)


def test_the_best_checkpoint_is_that_of_the_metric_named(tmp_path):
    done = jt.fit(Scored(save_every=4, keep_last=1, steps=16), tmp_path / "run", quiet=True)
    assert sorted(saved_steps(done.run.checkpoints)) == [8, 16]
    assert [(line["eval_accuracy"], line["eval_seen"]) for line in done.history] == [
        (0.0, 10), (0.4, 10), (0.8, 10), (0.8, 10), (0.8, 10),
    ]  # fmt: skip


def test_an_evaluation_needs_no_validation_data(tmp_path, monkeypatch):
    def task(self):
        batches = lambda state, batches: {"batches": len(list(batches))}  # noqa: E731
        return dataclasses.replace(super(Scored, self).task(), evaluate=batches, best_metric="batches")

    monkeypatch.setattr(Scored, "task", task)
    done = jt.fit(Scored(), tmp_path / "run", quiet=True)
    assert [line["eval_batches"] for line in done.history] == [0, 0, 0, 0]


def test_training_stops_when_evaluations_get_no_better(tmp_path):
    done = jt.fit(Scored(steps=40, patience=2), tmp_path / "run", quiet=True)
    assert (int(done.state.step), done.exit_status) == (16, 0)
    # The count continues in a resumed run: one more evaluation without a better one.
    resumed = jt.fit(Scored(steps=40, patience=3), tmp_path / "run", quiet=True, resume=True)
    assert int(resumed.state.step) == 20


def test_a_resumed_run_may_not_become_another(whole):
    with pytest.raises(jt.UserError, match=r"lr=0\.5 differs from the run's 0\.1"):
        jt.fit(Line(lr=0.5), whole.run.path, quiet=True, resume=True)


@dataclass(frozen=True, kw_only=True)
class NoTask(jt.Recipe):
    """A recipe that forgot its task."""


@dataclass(frozen=True, kw_only=True)
class WrongMetric(Scored):
    """A recipe whose best metric its evaluation does not return."""

    def task(self):
        return dataclasses.replace(super().task(), best_metric="f1")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Line, "recipe must be an instance, got the class Line: use Line()"),
        ({}, "recipe must be a jaxtrain.Recipe, got dict: subclass jaxtrain.Recipe"),
        (NoTask(), "NoTask has no task: define `def task(self) -> jaxtrain.Task`"),
        (
            WrongMetric(),
            "best_metric 'f1' is not a metric of the evaluation: set Task.best_metric to one of accuracy, seen",
        ),
        (Line(patience=0), "patience must be at least 1, got 0"),
        (Line(batch_size=64), "batch_size must be at most the number of examples, 48, got 64"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(recipe, message, tmp_path):
    with pytest.raises(jt.UserError) as raised:
        jt.fit(recipe, tmp_path / "run", quiet=True)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    # The caller's line, and that of the function which raises the error.
    assert len(traceback.extract_tb(raised.value.__traceback__)) == 2
    assert not (tmp_path / "run").exists() or not saved_steps(tmp_path / "run" / "checkpoints")


def test_metrics_of_the_loss_are_logged_as_means_of_the_interval(tmp_path):
    biases = []
    done = jt.fit(
        Line(), tmp_path / "run", quiet=True, on_step=lambda step, metrics, state: biases.append(float(metrics["bias"]))
    )
    logged = [line["bias"] for line in done.history if "loss" in line]
    np.testing.assert_allclose(logged, np.reshape(biases, (3, 4)).mean(1), rtol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Padded(Line):
    """Each batch has another number of rows that count."""

    def task(self):
        def loss_fn(params, batch, rng):
            residual = batch["x"] @ params["w"] - batch["y"]
            return jt.Loss.of(residual**2, batch["counts"]), {"same": jt.Loss.of(residual**2, batch["counts"])}

        counts = np.arange(EXAMPLES) % 5 < 2
        rows = [{**row, "counts": np.float32(count)} for row, count in zip(examples(), counts, strict=True)]
        return dataclasses.replace(super().task(), loss_fn=loss_fn, train=rows)


def test_metrics_of_an_interval_are_over_the_rows_of_its_loss(tmp_path):
    weights = []
    on_step = lambda step, metrics, state: weights.append(float(metrics["weight"]))  # noqa: E731
    done = jt.fit(Padded(), tmp_path / "run", quiet=True, on_step=on_step)
    assert len({*weights}) > 1
    logged = [(line["loss"], line["same"]) for line in done.history if "loss" in line]
    assert [loss for loss, _ in logged] == [same for _, same in logged]


def test_the_metric_to_go_by_may_be_named_as_in_the_log(tmp_path):
    recipe = dataclasses.replace(Scored(), patience=2)
    task = recipe.task()
    kind = dataclass(frozen=True, kw_only=True)(
        type("Named", (Scored,), {"task": lambda self: dataclasses.replace(task, best_metric="eval_accuracy")})
    )
    steps = [jt.fit(r, tmp_path / name, quiet=True).history[-1]["step"] for name, r in
             (("a", recipe), ("b", kind(patience=2)))]  # fmt: skip
    assert steps[0] == steps[1] == 12


def test_what_fit_returns_is_shown_in_a_line_and_as_a_curve(whole):
    assert repr(whole).startswith(f"Fit(run='{whole.run.path}', step=12, loss=")
    assert len(repr(whole)) < 200
    drawing = whole._repr_html_()
    assert drawing.count('class="c0" d="M') == 2  # the curve and its sample in the key
    assert "training loss" in drawing
    assert "validation" not in drawing
    assert "no loss was logged" in dataclasses.replace(whole, history=[])._repr_html_()


def test_messages_in_python_name_arguments(whole, tmp_path, capsys):
    with pytest.raises(
        jt.UserError, match=r"already holds a run: continue it with resume=True, or choose another out$"
    ):
        jt.fit(Line(), whole.run.path, quiet=True)
    with pytest.raises(jt.UserError, match=r"^lr=0\.2 differs from the run's 0\.1: a resumed run may change only"):
        jt.fit(Line(lr=0.2), whole.run.path, resume=True, quiet=True)
    other = dataclass(frozen=True, kw_only=True)(type("Other", (Line,), {}))
    with pytest.raises(jt.UserError, match=r"holds a run of .*Line, not of .*Other: use another out$"):
        jt.fit(other(), whole.run.path, resume=True, quiet=True)
    with pytest.raises(jt.UserError, match=r"^out is empty: give the folder of the run"):
        jt.fit(Line(), "", quiet=True)
    jt.fit(Line(), whole.run.path, resume=True, quiet=True)
    assert capsys.readouterr().err.endswith("step 12 of 12 is done: continue training with resume=True, steps=N\n")


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(tmp_path, monkeypatch, capsys):
    free = 20
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(
        jt.UserError, match=r"a checkpoint takes \d+ B, but the disk of .* has only 20 B free: make room"
    ):
        jt.fit(Line(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    free = 60
    jt.fit(Line(steps=1), tmp_path / "run", quiet=True)
    assert "warning: 5 checkpoints of " in capsys.readouterr().err


class Displayed:
    """Stands for `IPython.display.display`: one handle, whose content is replaced."""

    def __init__(self):
        self.contents = []

    def __call__(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.contents.append(content)
        return self

    def update(self, content, *, raw):
        assert raw
        self.contents.append(content)


def test_a_notebook_has_one_display_that_is_updated(tmp_path, monkeypatch):
    displayed = Displayed()
    module = importlib.import_module("jaxtrain.runner.fit")  # the package has the function under this name
    monkeypatch.setattr(module, "console_here", lambda wording: NotebookConsole(displayed, wording))
    monkeypatch.setattr("jaxtrain.observe.notebook._REDRAW_S", 0)
    jt.fit(Scored(), tmp_path / "run")
    texts = [content["text/plain"] for content in displayed.contents]
    assert any("step 4 of 12" in text for text in texts)
    assert "reading the data, initializing the model" in texts[-1]
    assert "step 12: accuracy 0.8000, seen 10.0000" in texts[-1]
    assert texts[-1].count("step 12 of 12") == 1
    assert displayed.contents[-1]["text/html"].startswith("<pre style=")
    assert displayed.contents.index(displayed.contents[-1]) > 5


class Examples:
    """A dataset with `__len__` and `__getitem__`, as PyTorch's."""

    def __init__(self):
        self.rows = examples()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]["x"], self.rows[index]["y"]


def arrays():
    rows = examples()
    return {name: np.stack([row[name] for row in rows]) for name in ("x", "y")}


def data_loader():
    torch = pytest.importorskip("torch")
    return torch.utils.data.DataLoader(Examples(), batch_size=8, shuffle=True)


KINDS = {
    "mapping": arrays,
    "DataLoader": data_loader,
    "dataset of tuples": Examples,
    "stream": lambda: examples,
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_data_resumes_to_the_same_bits(kind, tmp_path, monkeypatch):
    def task(self):
        made = Line.__dict__["task"](self)
        return dataclasses.replace(made, train=KINDS[kind](), validation=KINDS[kind](), batch_keys=("x", "y"))

    monkeypatch.setattr(Scored, "task", task)

    def interrupt(step, metrics, state):
        if step == 9:
            signal.raise_signal(signal.SIGINT)

    whole = jt.fit(Scored(), tmp_path / "whole", quiet=True)
    jt.fit(Scored(), tmp_path / "parts", quiet=True, on_step=interrupt)
    parts = jt.fit(Scored(), tmp_path / "parts", quiet=True, resume=True)
    assert same(whole.state, parts.state)
    assert [line.get("eval_loss") for line in whole.history] == [line.get("eval_loss") for line in parts.history]
    # Every kind evaluates the same examples.
    assert whole.history[0]["eval_loss"] == pytest.approx(np.mean([row["y"] ** 2 for row in examples()]), rel=1e-6)


@pytest.mark.parametrize("reads_weight", [False, True])
def test_padding_of_the_last_batch_never_counts(reads_weight, tmp_path, monkeypatch):
    def loss_fn(params, batch, rng):
        squares = (batch["x"] @ params["w"] - batch["y"]) ** 2
        weight = batch.get("weight") if reads_weight else None
        return jt.Loss.of(squares, weight), {"largest": jt.Loss.of(squares, weight)}

    def task(self):
        return dataclasses.replace(Line.__dict__["task"](self), loss_fn=loss_fn, validation=examples()[:11])

    monkeypatch.setattr(Scored, "task", task)
    done = jt.fit(Scored(steps=1), tmp_path / "run", quiet=True)
    expected = np.mean([row["y"] ** 2 for row in examples()[:11]])
    assert done.history[0]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert done.history[0]["eval_largest"] == pytest.approx(expected, rel=1e-6)


def test_an_iterable_dataset_of_pytorch_is_evaluated_to_its_end(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(examples()[:11])

    monkeypatch.setattr(
        Scored, "task", lambda self: dataclasses.replace(Line.__dict__["task"](self), validation=Stream())
    )
    done = jt.fit(Scored(steps=1), tmp_path / "run", quiet=True)
    expected = np.mean([row["y"] ** 2 for row in examples()[:11]])
    assert done.history[0]["eval_loss"] == pytest.approx(expected, rel=1e-6)
