"""Device utilization and parameter histograms of a run, on a CPU with the properties of a GPU."""

import json
import types
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxtrain.cli import main
from jaxtrain.observe import gauges


def test_a_run_on_a_gpu_logs_its_utilization_and_histograms(monkeypatch, capsys):
    busy = types.SimpleNamespace(mean=lambda: 0.25, close=lambda: None)
    monkeypatch.setattr(gauges, "peak_flops", lambda device, precision: 1e12)
    monkeypatch.setattr(gauges, "GpuUtilization", lambda devices: busy)
    flags = "--steps 6 --hidden 32 --batch-size 16 --log-every 1 --eval-every 3 --out run --histograms"
    assert main(["train", "digits-mlp", *flags.split()]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()][1:]
    # 64 × 32 and 32 × 10 weights, 16 rows, one multiply-add each, once forward and twice backward.
    flops_per_step = 3 * 2 * 16 * (64 * 32 + 32 * 10)
    for line in lines:
        assert line["mfu"] == pytest.approx(flops_per_step / 1e12 / line["step_time_s"])
        assert line["gpu_utilisation"] == 0.25
    out = capsys.readouterr().out
    assert out.count("the GPU is busy 25% of the time") == 1
    events = EventAccumulator("run/tensorboard", size_guidance={"histograms": 0})
    events.Reload()
    assert set(events.Tags()["histograms"]) == {f"layers/{i}/{part}" for i in (0, 1) for part in ("bias", "kernel")}
    kernel = events.Histograms("layers/0/kernel")
    assert [(e.step, sum(e.histogram_value.bucket)) for e in kernel] == [(3, 2048), (6, 2048)]
    assert "GPU utilization" in Path("run/report.html").read_text()


def test_a_run_on_a_cpu_logs_no_utilization(capsys):
    flags = "--steps 2 --hidden 32 --batch-size 16 --log-every 1 --out run"
    assert main(["train", "digits-mlp", *flags.split()]) == 0
    assert not {"mfu", "gpu_utilisation"} & set(json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1]))
