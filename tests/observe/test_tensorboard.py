"""What is written for TensorBoard, read back by TensorBoard's own reader."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxtrain.observe import MetricsLog, read_record, write_result
from jaxtrain.observe.histograms import BINS, histograms
from jaxtrain.observe.tensorboard import Events, write_end

from .runs import line, write_run


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    return events


def test_the_end_of_a_run_adds_its_settings_and_its_sample_and_takes_nothing_away(tmp_path):
    run = write_run(tmp_path / "run")
    write_result(run, step=40, references={}, sample="def f():\n    return 1\n")
    with MetricsLog(tmp_path / "metrics.jsonl", run.tensorboard, from_step=0) as log:
        for step in (10, 20):
            log.write({k: v for k, v in line(step).items() if v is not None})
    write_end(run.tensorboard, read_record(run))
    events = read(run.tensorboard)
    assert [e.step for e in events.Scalars("loss")] == [10, 20]
    (text,) = events.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (40, b"    def f():\n        return 1\n")

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def hparams(tag):
        return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)

    settings = hparams("session_start_info").session_start_info.hparams
    assert {name: settings[name].number_value for name in ("steps", "lr")} == {"steps": 40.0, "lr": 0.01}
    assert {name: settings[name].string_value for name in ("recipe", "data")} == {
        "recipe": "digits-mlp",
        "data": "None",
    }
    metrics = [info.name.tag for info in hparams("experiment").experiment.metric_infos]
    assert metrics == ["eval/loss", "eval/accuracy"]


def test_histograms_are_numpys_and_know_only_what_is_finite(tmp_path):
    draws = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    spoiled = np.concatenate([draws.ravel(), [np.inf, np.nan, -np.inf]]).astype(np.float32)
    tree = {
        "w": jnp.array(draws),
        "spoiled": jnp.array(spoiled),
        "flat": jnp.full((3, 2), 2.0, jnp.bfloat16),
        "none": jnp.full(2, jnp.nan),
        "count": jnp.arange(3),
    }
    found = histograms({"layer": tree})
    assert set(found) == {"layer/w", "layer/spoiled", "layer/flat", "layer/none"}
    counts, edges = np.histogram(draws, BINS)
    # A draw at an edge may round to either side.
    assert np.abs(found["layer/w"].counts - counts).sum() <= 2
    np.testing.assert_allclose(found["layer/w"].edges(), edges, atol=1e-6)
    np.testing.assert_array_equal(found["layer/w"].counts, found["layer/spoiled"].counts)
    assert float(found["layer/spoiled"].sum_squares) == pytest.approx(
        float((draws.astype(np.float64) ** 2).sum()), rel=1e-5
    )

    with Events(tmp_path / "tb", from_step=0) as events:
        events.histograms(7, found)
    events = read(tmp_path / "tb")
    assert set(events.Tags()["histograms"]) == {"layer/w", "layer/spoiled", "layer/flat"}
    (event,) = events.Histograms("layer/w")
    assert (event.step, event.histogram_value.num, sum(event.histogram_value.bucket)) == (7, 200, 200)
    assert events.Histograms("layer/flat")[0].histogram_value.max == 2.0


def test_pytorch_is_not_imported_on_the_way(tmp_path):
    written = "import sys; from pathlib import Path; from jaxtrain.observe.tensorboard import Events; "
    written += f"Events(Path({str(tmp_path / 'events')!r})); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", written], check=True)
