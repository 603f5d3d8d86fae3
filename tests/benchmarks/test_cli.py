"""The command: flags select rows, and figures are kept if the measurement is aborted."""

import json

import numpy as np
import pytest

from benchmarks import cli, equality, timing
from benchmarks.job import Job
from benchmarks.suites import SUITES, Suite, select
from benchmarks.timing import Timing
from jaxtrain.errors import RunFailed, UserError

SIZES = {"vocab_size": 17, "width": 8, "depth": 1, "heads": 2, "rows": 4, "length": 4}
FLOPS = 3 * 2 * 4 * 4 * (12 * 8**2 + 17 * 8 + 2 * 4 * 8)


@pytest.fixture
def fake_timing(monkeypatch):
    """Replace measurements by one second per step; `fake_timing[workload]` is an error to raise instead."""
    errors = {}

    def time_jobs(jobs, rounds, budget, report, beside):
        if jobs[0].workload in errors:
            raise errors[jobs[0].workload]
        return [Timing(job, np.ones(5), np.ones(5), "cpu", None, None, 10, 1, turns=np.ones(1)) for job in jobs]

    monkeypatch.setattr(equality, "verify", lambda *_: True)
    monkeypatch.setattr(timing, "warm_up", lambda *_: [])
    monkeypatch.setattr(timing, "time_jobs", time_jobs)
    return errors


@pytest.mark.parametrize(
    ("error", "status"), [(RunFailed("resnet18 by jax in fp32: it failed"), 1), (KeyboardInterrupt(), 130)]
)
def test_figures_are_kept_if_a_later_workload_aborts_the_command(fake_timing, error, status, tmp_path, capsys):
    fake_timing["resnet18"] = error
    path, page = tmp_path / "f.json", tmp_path / "f.html"
    assert cli.main(["cpu", "--json", str(path), "--html", str(page)]) == status
    document = json.loads(path.read_text())
    assert {row["workload"] for row in document["rows"]} == {"gpt2-tiny", "mlp-launch-bound"}
    assert document["ratios"]
    assert document["complete"] is False
    assert "mlp-launch-bound" in page.read_text()
    captured = capsys.readouterr()
    assert "mlp-launch-bound" in captured.out
    assert captured.err.count("\n") == 1


def test_figures_are_written_after_every_workload(fake_timing, monkeypatch, tmp_path):
    path, written = tmp_path / "f.json", []
    real = timing.time_jobs

    def time_jobs(jobs, *arguments):
        written.append([row["workload"] for row in json.loads(path.read_text())["rows"]] if path.exists() else None)
        return real(jobs, *arguments)

    monkeypatch.setattr(timing, "time_jobs", time_jobs)
    assert cli.main(["cpu", "--precision", "fp32", "--json", str(path)]) == 0
    assert written == [None, ["gpt2-tiny"] * 3, ["gpt2-tiny"] * 3 + ["mlp-launch-bound"] * 3]
    assert json.loads(path.read_text())["complete"] is True


def test_an_interrupted_write_leaves_the_previous_figures(tmp_path):
    path = tmp_path / "f.json"
    cli.write_json(path, {"rows": [1]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        cli.write_json(path, {"rows": [float("nan")]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [*tmp_path.iterdir()] == [path]


def test_rows_are_chosen_by_workload_and_precision():
    suite = select("cpu", ["mlp-launch-bound", "resnet18"], ["fp32"])
    assert [(group[0].workload, len(group)) for group in suite.groups] == [("mlp-launch-bound", 3), ("resnet18", 2)]
    assert {job.precision for group in suite.groups for job in group} == {"fp32"}
    assert suite.ceilings == ["fp32"]
    assert select("gpu", precisions=["bf16_compute"]).ceilings == ["bf16"]
    assert select("cpu") == SUITES["cpu"]


def test_a_combination_without_rows_is_refused():
    with pytest.raises(UserError, match="resnet18 in fp32"):
        select("cpu", ["resnet18"], ["bf16"])


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["gpu2"], "cpu, gpu, optimizers, host, features, scaling"),
        (["cpu", "--workload", "mlp"], "gpt2-tiny, mlp-launch-bound, resnet18"),
        (["cpu", "--precision", "fp8"], "fp32, bf16"),
        (["cpu", "--minutes", "0"], "--minutes must be positive and finite, got 0.0"),
        (["cpu", "--json", "{}/nowhere/f.json"], "cannot be written: name a file in a writable folder"),
    ],
)
def test_wrong_usage_is_a_one_line_error_with_the_remedy(arguments, known, tmp_path, capsys):
    assert cli.main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert known in error


def test_the_gpu_suite_is_refused_at_once_without_a_gpu(capsys):
    assert cli.main(["gpu"]) == 2
    out, error = capsys.readouterr()
    assert not out
    remedy = "choose the suite cpu, or ask `jaxtrain doctor` what is missing"
    assert error == f"benchmarks: suite gpu needs a GPU, but JAX runs on the cpu: {remedy}\n"


def test_both_engines_are_timed_on_the_same_work(monkeypatch, tmp_path, capsys):
    groups = [[Job("gpt2-tiny", engine, sizes=SIZES) for engine in ("jax", "torch_eager")]]
    monkeypatch.setitem(SUITES, "short", Suite(groups, rounds=2, ceilings=["fp32"]))
    files = {kind: tmp_path / f"figures.{kind}" for kind in ("json", "html", "png")}
    assert cli.main(["short", *(word for kind, path in files.items() for word in (f"--{kind}", str(path)))]) == 0
    document = json.loads(files["json"].read_text())
    assert [row["engine"] for row in document["rows"]] == ["jax", "torch_eager"]
    for row in document["rows"]:
        assert 0 < row["min_s"] <= row["lower_decile_s"] <= row["median_s"] <= row["upper_decile_s"]
        assert row["peak_bytes"] > 0
        assert row["flops"] == FLOPS
        assert row["per_s"] == 16 / row["lower_decile_s"]
    jax_row, torch_row = document["rows"]
    assert min(jax_row["compile_s"], jax_row["warm_compile_s"]) > 0
    assert jax_row["predicted_s"] is None  # for GPUs only
    assert 0.5 < document["ratios"][0]["jax_vs_eager"] / (torch_row["median_s"] / jax_row["median_s"]) < 2
    assert document["ratios"][0]["jax_vs_compile"] is None
    products = [row for row in document["ceilings"] if row["what"] == "product"]
    assert [row["beside"] for row in products] == ["gpt2-tiny"] * 2
    peak = max(row["per_s"] for row in products)
    assert all(row["mfu"] == pytest.approx(FLOPS / row["lower_decile_s"] / peak) for row in document["rows"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "gpt2-tiny" in files["html"].read_text()
    assert "eager PyTorch" in capsys.readouterr().out
