"""Engines must compute equal losses in float64, which is checked once per workload before anything is timed."""

import dataclasses

import pytest

from benchmarks import cli, equality, measure, timing
from benchmarks.budget import Budget
from benchmarks.equality import check_same_work, float64_jobs
from benchmarks.job import Job
from benchmarks.suites import SUITES
from benchmarks.workloads import WORKLOADS
from jaxtrain.errors import RunFailed

SIZES = {"vocab_size": 17, "width": 8, "depth": 1, "heads": 2, "rows": 4, "length": 4}
JAX, TORCH = Job("gpt2-tiny", "jax", "fp64"), Job("gpt2-tiny", "torch_eager", "fp64")


class InThisProcess:
    """Run the check of `benchmarks.equality` in the process of the test."""

    def __init__(self, label, *arguments):
        self.line = arguments[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def receive(self, timeout):
        return {"difference": equality.difference(self.line)}


def test_every_workload_is_checked_once_before_anything_is_timed(monkeypatch):
    calls = []
    monkeypatch.setattr(equality, "verify", lambda jobs, *_: calls.append(("check", jobs[0].workload)) or True)
    monkeypatch.setattr(timing, "time_jobs", lambda jobs, *_: calls.append(("time", jobs[0].workload)) or [])
    measure.measure(SUITES["cpu"], Budget(600), print, print, lambda _: None)
    assert calls[:3] == [("check", name) for name in ("gpt2-tiny", "mlp-launch-bound", "resnet18")]
    assert {kind for kind, _ in calls[3:]} == {"time"}


@pytest.mark.parametrize("name", ["cpu", "gpu", "features", "scaling", "host"])
def test_the_check_is_in_float64_and_compares_jax_with_pytorch(name):
    jobs = [job for group in SUITES[name].groups for job in group]
    for workload in {job.workload for job in jobs} & WORKLOADS.keys():
        checks = float64_jobs([job for job in jobs if job.workload == workload])
        assert {job.precision for job in checks} == {"fp64"}
        assert {job.engine for job in checks} == {"jax", "torch_eager"}
        assert all(job.sizes["rows"] % job.accumulate == 0 for job in checks)


def test_losses_that_differ_by_rounding_are_accepted():
    # In float32, the second loss was 0.000511642 on another CPU.
    losses = [0.51, 0.000511597, 0.1745156]
    check_same_work([JAX, TORCH], [losses, [x * (1 + 1e-10) for x in losses]])


@pytest.mark.parametrize("step", range(3))
def test_losses_that_differ_in_float64_are_refused(step):
    losses = [0.51, 0.000511597, 0.1745156]
    other = [x * (1 + 1e-7 * (i == step)) for i, x in enumerate(losses)]
    with pytest.raises(RunFailed, match="gpt2-tiny: torch_eager and jax do different work"):
        check_same_work([JAX, TORCH], [losses, other])
    with pytest.raises(RunFailed):
        check_same_work([JAX, TORCH], [losses, [float("nan")] * 3])


def test_a_feature_may_change_the_steps_after_the_first():
    bare = dataclasses.replace(JAX, feature="bare")
    check_same_work([bare, JAX], [[3.0, 2.9], [3.0, 2.8]])
    with pytest.raises(RunFailed):
        check_same_work([bare, JAX], [[3.0, 2.9], [2.9, 2.8]])
    with pytest.raises(RunFailed):
        check_same_work([JAX, TORCH], [[3.0, 2.8], [3.0, 2.9]])
    with pytest.raises(RunFailed, match="torch_eager and jax"):
        check_same_work([bare, JAX, TORCH], [[3.0, 2.9], [3.0, 2.8], [3.0, 2.9]])


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}])
def test_engines_agree_in_float64(settings):
    jobs = [Job("mlp-host", engine, "fp64", sizes={"rows": 2}, **settings) for engine in ("jax", "torch_eager")]
    losses = [equality.losses(job) for job in jobs]
    assert len(set(losses[0])) == equality.STEPS
    check_same_work(jobs, losses)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"remat": "full"}])
def test_engines_of_a_transformer_agree_in_float64_under_every_setting(settings):
    jobs = [Job("gpt2-tiny", engine, "fp64", sizes=SIZES, **settings) for engine in ("jax", "torch_eager")]
    check_same_work(jobs, [equality.losses(job) for job in jobs])


def test_a_loss_that_is_a_millionth_larger_is_refused(monkeypatch, capsys):
    workload = WORKLOADS["mlp-host"]

    def make(**sizes):
        case = workload.make(**sizes)

        def loss_fn(params, batch, rng):
            loss, metrics = case.loss_fn(params, batch, rng)
            return loss._replace(total=loss.total * (1 + 1e-6)), metrics

        return dataclasses.replace(case, loss_fn=loss_fn)

    monkeypatch.setitem(WORKLOADS, "mlp-host", dataclasses.replace(workload, make=make))
    monkeypatch.setattr(equality, "Process", InThisProcess)
    assert cli.main(["host", "--workload", "mlp-host"]) == 1
    error = capsys.readouterr().err
    assert "mlp-host: torch_eager and jax do different work" in error
    assert error.count("\n") == 1


def test_a_different_model_is_refused(monkeypatch, capsys):
    def make(**sizes):
        from jaxtrain.models import GPT2Config
        from parity.cases.built_in import gpt2_case

        config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        return gpt2_case.case(dataclasses.replace(config, layer_norm_epsilon=1e-6), reference=config, rows=2, tokens=5)

    monkeypatch.setitem(WORKLOADS, "gpt2-tiny", dataclasses.replace(WORKLOADS["gpt2-tiny"], make=make))
    monkeypatch.setattr(equality, "Process", InThisProcess)
    assert cli.main(["cpu", "--workload", "gpt2-tiny"]) == 1
    error = capsys.readouterr().err
    assert "do different work" in error
    assert error.count("\n") == 1
