"""`jaxtrain bench` times one's own work, once both frameworks are proved to do the same."""

import json
import textwrap

import jax
import numpy as np
import pytest

from benchmarks import bench, own_work, timing
from benchmarks.engines import engine
from benchmarks.job import Job
from benchmarks.own_work import Facts, facts, own_workload
from benchmarks.timing import Timing
from jaxtrain.cli import main
from jaxtrain.errors import RunFailed

FILE = """
    import dataclasses
    from dataclasses import dataclass

    import jax.numpy as jnp
    import numpy as np
    import torch

    import jaxtrain as jt
    from parity.cases.built_in import mlp_case

    class Tail(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

        def forward(self, x):
            return x + self.drop(torch.tanh(self.layer(x)))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tails = torch.nn.ModuleList([Tail() for _ in range(3)])

        def forward(self, x):
            for tail in self.tails:
                x = tail(x)
            return x

    def net():
        return Net(), {"x": torch.zeros(6, 4)}

    def plain():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.zeros(6, 4)

    def other():
        case = mlp_case.case(side=2, hidden=4)

        def loss_fn(params, batch, rng):
            loss, metrics = case.loss_fn(params, batch, rng)
            return loss._replace(total=loss.total + 1e-6 * (params["layers"][0]["bias"] ** 2).sum()), metrics

        return dataclasses.replace(case, loss_fn=loss_fn)

    def wrong():
        return 3

    @dataclass(frozen=True, kw_only=True)
    class Run(jt.Recipe):
        batch_size: int = 8
        accumulate: int = 2
        steps: int = 50
        warmup_steps: int = 1
        precision: str = "bf16"

        def task(self):
            def loss_fn(params, batch, rng):
                return jt.Loss.of((batch["x"] @ params["kernel"] - batch["y"]) ** 2), {}

            data = {"x": np.eye(32, 4, dtype=np.float32), "y": np.ones((32, 3), np.float32)}
            init = lambda: {"kernel": jnp.zeros((4, 3))}
            return jt.Task(init=init, loss_fn=loss_fn, train=data, unit="pixels", units_per_row=5)

        def torch_model(self):
            return torch.nn.Linear(4, 3, bias=False)

        def torch_loss(self, model, batch):
            squares = (model(batch["x"]) - batch["y"]) ** 2
            return squares.sum(), squares.numel()
"""
SAME = Facts("net", "", "fp32", 1, True, 1e-15, ["the seed"])


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield "mine.py"


def test_a_module_with_dropout_is_proved_and_its_loop_is_seen(file):
    found = facts(f"{file}::net")
    assert (found.name, found.difference, found.precision, found.accumulate) == ("net", "", "fp32", 1)
    assert found.has_loop
    assert 0 < found.largest < 1e-10
    assert not facts(f"{file}::plain").has_loop


def test_unequal_work_names_the_tensor(file):
    difference = facts(f"{file}::other").difference
    assert "JAX and PyTorch do different work" in difference
    assert "\n" not in difference
    assert "bias" in difference


@pytest.mark.parametrize(("name", "units"), [("plain", (6, "examples")), ("Run", (40, "pixels"))])
def test_engines_take_the_same_steps(file, name, units):
    found = facts(f"{file}::{name}")
    assert not found.difference
    jobs = [Job(f"{file}::{name}", framework, accumulate=found.accumulate) for framework in ("jax", "torch_eager")]
    ours, theirs = (engine(job, own_workload(job.workload)) for job in jobs)
    for _ in range(4):
        ours.step()
        theirs.step()
    # The fused kernel of the optimizer and the scheduler are those of the work.
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    assert len(set(ours.losses)) >= 3
    assert ours.units == theirs.units == units


class Answered:
    """The process of the check, with an answer."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def receive(self, timeout):
        return self.answer


@pytest.fixture
def timed(monkeypatch):
    """Replace measurements; `timed` has the jobs of each, and the seconds or the error of engines."""
    seconds, calls = {"jax": 1.0, "torch_eager": 2.0, "torch_compile": 1.5, "product": 0.5}, []

    def time_jobs(jobs, rounds, budget, report, beside=()):
        calls.append([(job.engine, job.feature, rounds) for job in jobs])
        for job in jobs:
            if isinstance(seconds[job.engine], Exception):
                raise seconds[job.engine]
        walls = [np.full(6, seconds[job.engine]) for job in jobs]
        return [
            Timing(job, x, x, "cpu", None, None, 10, 1, turns=x, units=(6, "examples"))
            for job, x in zip(jobs, walls, strict=True)
        ]

    monkeypatch.setattr(bench, "Process", Answered(dataclasses_dict(SAME)))
    monkeypatch.setattr(timing, "time_jobs", time_jobs)
    monkeypatch.setattr(timing, "warm_up", lambda *_: [])
    return seconds, calls


def dataclasses_dict(found):
    return {name: getattr(found, name) for name in Facts.__dataclass_fields__}


def test_first_figures_are_written_before_all_engines_are_timed(timed, tmp_path, capsys, monkeypatch):
    _, calls = timed
    documents, real = [], bench.write_figures
    monkeypatch.setattr(bench, "write_figures", lambda doc, **files: (documents.append(doc), real(doc, **files)))
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "html", "png")]
    assert main(["bench", "mine.py::net", *files]) == 0
    first = [("jax", "", bench.FIRST_ROUNDS), ("torch_eager", "", bench.FIRST_ROUNDS)]
    rest = [("jax", "loop", None), ("jax", "", None), ("torch_eager", "", None), ("torch_compile", "", None)]
    assert calls == [first, rest]
    assert [x["complete"] for x in documents] == [False, True]
    document = json.loads((tmp_path / "json").read_text())
    assert [(row["workload"], row["engine"]) for row in document["rows"]] == [("net", x) for x, *_ in rest]
    assert document["ratios"][1]["jax_vs_best"] == 1.5
    assert document["same_work"] == {"updates": 3, "largest_difference": 1e-15}
    assert "net fp32: JAX is 2.00× (2.00 to 2.00) as fast as eager PyTorch and 1.50×" in capsys.readouterr().out
    page = (tmp_path / "html").read_text()
    assert all(text in page for text in ('class="meter"', "not compared: the seed", "MFU: FLOPs of the model"))
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")


def test_a_module_that_pytorch_cannot_compile_is_timed_without(timed, tmp_path, capsys):
    seconds, _ = timed
    seconds["torch_compile"] = RunFailed("mine.py::net by torch_compile in fp32: Unsupported")
    path = tmp_path / "f.json"
    assert main(["bench", "mine.py::net", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [row["engine"] for row in document["rows"]] == ["jax", "jax", "torch_eager"]
    assert document["notes"][0] == "left out: mine.py::net by torch_compile in fp32: Unsupported"
    assert document["notes"][0] in capsys.readouterr().out
    seconds["torch_eager"] = RunFailed("mine.py::net by torch_eager in fp32: out of memory")
    assert main(["bench", "mine.py::net"]) == 1
    assert capsys.readouterr().err == "jaxtrain: mine.py::net by torch_eager in fp32: out of memory\n"


def test_without_time_for_more_the_first_figures_are_the_last(timed, tmp_path, monkeypatch):
    _, calls = timed
    clock = iter([0.0, *range(0, 600, 20)])
    monkeypatch.setattr(bench, "Budget", lambda seconds: bench_budget(seconds, lambda: next(clock)))
    path = tmp_path / "f.json"
    assert main(["bench", "mine.py::net", "--minutes", "2", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(calls) == 1
    assert document["complete"]
    assert "use --minutes" in document["notes"][0]


bench_budget = bench.Budget


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"wrong": "'x' in mine.py is not a case"}, 2, "'x' in mine.py is not a case"),
        ({**dataclasses_dict(SAME), "difference": "net: JAX and PyTorch do different work"}, 1, "do different work"),
        ({**dataclasses_dict(SAME), "precision": "fp8"}, 2, "'fp8' is not in both frameworks: choose from fp32, tf32"),
    ],
)
def test_nothing_is_timed_unless_the_work_is_the_same(timed, monkeypatch, capsys, answer, status, message):
    monkeypatch.setattr(bench, "Process", Answered(answer))
    assert main(["bench", "mine.py::net"]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not timed[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FILE.py::NAME"),
        (["mine.py"], "'mine.py' names no work: write jaxtrain bench path/to/file.py::NAME"),
        (["mine.py::net", "--precision", "fp8"], "precision 'fp8' is not in both frameworks: choose from fp32"),
        (["mine.py::net", "--minutes", "0"], "--minutes must be positive and finite, got 0.0"),
        (["mine.py::net", "--json", "nowhere/f.json"], "cannot be written: name a file in a writable folder"),
    ],
)
def test_wrong_usage_is_one_line_with_the_remedy(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_a_file_does_not_have_is_refused(file):
    with pytest.raises(own_work.UserError, match=r"'wrong' in mine.py is not a case"):
        own_workload(f"{file}::wrong")
    with pytest.raises(own_work.UserError, match=r"there is no file 'none.py'"):
        own_workload("none.py::net")


@pytest.mark.nightly
def test_a_module_is_timed_from_the_command_line(file, capsys):
    assert main(["bench", f"{file}::net", "--minutes", "3", "--json", "f.json"]) == 0
    with open("f.json") as text:
        document = json.load(text)
    engines = [(row["engine"], row["feature"]) for row in document["rows"]]
    assert engines == [("jax", "loop"), ("jax", ""), ("torch_eager", ""), ("torch_compile", "")]
    assert all(row["mfu"] > 0 and row["peak_bytes"] > 0 for row in document["rows"])
    assert all(row["compile_s"] > 0 for row in document["rows"] if row["engine"] != "torch_eager")
    for ratio in document["ratios"]:
        for engine_name, key in (("torch_eager", "jax_vs_eager"), ("torch_compile", "jax_vs_compile")):
            low, high = ratio["intervals"][engine_name]
            assert low <= ratio[key] <= high
