"""A run with `watch_precision` logs what its precision loses, in metrics.jsonl, TensorBoard and the report."""

import re
from dataclasses import dataclass, replace
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.observe import read_metrics, read_record
from jaxtrain.observe.charts import charts
from jaxtrain.observe.run_report import render_report
from jaxtrain.step import KINDS


def squared_error(params, batch, rng):
    hidden = jt.block(lambda w, x: jnp.tanh(x @ w))(params["w"], batch["x"])
    return jt.Loss.of((hidden @ params["head"] - batch["y"]) ** 2), {}


@dataclass(frozen=True, kw_only=True)
class Regression(jt.Recipe):
    """A regression whose gradients underflow."""

    steps: int = 4
    batch_size: int = 8
    log_every: int = 4
    eval_every: int = 4
    precision: str = "fp16"
    loss_scale: str | None = "static_loss_scale(scale=1e-7)"
    watch_precision: int = 2

    def task(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(16, 4)).astype(np.float32)
        params = {"w": rng.normal(size=(4, 4)).astype(np.float32), "head": rng.normal(size=(4, 1)).astype(np.float32)}
        return jt.Task(init=lambda: params, loss_fn=squared_error, train={"x": x, "y": x[:, :1]})

    def make_optimizer(self):
        return optax.sgd(1e-3)


def test_a_run_logs_what_it_loses_from_its_first_update_on(tmp_path, capsys):
    recipe = Regression()
    done = jt.fit(recipe, tmp_path / "run")
    lines = {line.step: line.precision for line in read_metrics(done.run.metrics) if line.precision}
    assert [*lines] == [1, 3]
    losses = lines[1]
    assert [layer.name for layer in losses.layers] == ["layer 0", "after the layers"]
    first = next(line for line in done.history if line["step"] == 1)
    share = first["precision/layer 0/weight_gradients/underflow"]
    assert share == losses.layers[0].weight_gradients.share("underflow") > 0.01

    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    for line in losses.advice():
        # `fit` names settings as they are written in Python.
        advice = line.replace("--loss-scale ", "loss_scale=")
        assert printed.count(re.sub(r"\s+", " ", f"step 1: {advice}")) == 1
    assert printed.count("layer 0: ") == len([key for key in losses.advice_by_kind() if key.startswith("layer 0/")])

    events = EventAccumulator(str(done.run.tensorboard), size_guidance={"scalars": 0}).Reload()
    logged = events.Scalars("precision/layer 0/weight_gradients/underflow")
    assert next((event.step, event.value) for event in logged) == (1, pytest.approx(share))
    assert len(logged) == 2

    record = read_record(done.run)
    assert not [chart.title for chart in charts([record]) if "precision" in chart.title]
    html = render_report([record])
    assert "What float16 loses" in html
    figures = re.findall(r'<svg class="chart" role="img".*?(?=\n *</figure>)', html, re.DOTALL)
    assert len([ElementTree.fromstring(figure) for figure in figures]) == 2
    shown = lines[3]
    for layer in shown.layers:
        for kind in KINDS:
            found = getattr(layer, kind)
            assert not found.total or f">{found.lost:.2%}</td>" in html or not found.lost
    for line in shown.advice():
        assert line.replace("'", "&#39;") in html
    # A run that is not watched computes the same, and its report has no such section.
    plain = jt.fit(replace(recipe, watch_precision=0), tmp_path / "plain", quiet=True)
    assert float(plain.state.params["w"][0, 0]) == float(done.state.params["w"][0, 0])
    assert "What float16 loses" not in render_report([read_record(plain.run)])


def test_full_precision_has_nothing_to_watch(tmp_path):
    with pytest.raises(UserError, match="watch_precision 2 measures what 16 or 8 bits lose, which is not supported"):
        jt.fit(Regression(precision="fp32", loss_scale=None), tmp_path / "run", quiet=True)
