"""The command: its output, files and exit status."""

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import parity
from parity.case import Case
from parity.cases import CASES, SUMMARIES
from parity.cases.built_in import gpt2_case
from parity.cases.own import own_case
from parity.cli import main
from parity.compare.examination import Examination
from parity.compare.verdict import Verdict
from parity.progress import report
from parity.record import Record, Snapshot
from parity.report import Result, document, waiting
from parity.settings import Settings

ROW = [
    *("name", "precision", "accumulate", "remat", "dropout", "optimizer", "steps", "seed", "passed", "loss_rel"),
    *("grad_rel_max", "grad_worst", "param_rel_max", "error_ratio", "tensor_worst", "tensor_ratio"),
    *("first_divergence", "stage", "diagnosis", "unlocated", "faults", "notes", "not_exercised", "trajectory"),
]


def examination(verdict: Verdict) -> Examination:
    snapshot = Snapshot({}, {}, {})
    record = Record(np.ones(1), {}, snapshot, snapshot, np.ones(2), np.ones(1))
    return Examination(verdict, record, record, record)


def test_list_prints_one_line_per_case_and_imports_no_framework() -> None:
    program = "import sys; from parity.cli import main; main(['list']); print({'torch', 'jax'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    *lines, imported = printed.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert imported == "set()"


def test_cases_that_pass_exit_0_and_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "parity.json"
    argv = ["run", "mlp", "--precision", "fp64,fp32", "--precision", "bf16", "--accumulate", "2", "--steps", "3"]
    assert main([*argv, "--seed", "7", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith(("mlp fp64: ", "mlp fp32: ", "mlp bf16: ")) for line in err.splitlines())
    assert out.splitlines()[0].startswith("fp64: within 1e-10 of PyTorch")
    written = json.loads(path.read_text())
    assert list(written) == ["environment", "cases", "passed", "failed"]
    assert (written["passed"], written["failed"]) == (3, 0)
    assert {"python", "platform", "jax", "torch", "devices"} <= set(written["environment"])
    for row, precision in zip(written["cases"], ["fp64", "fp32", "bf16"], strict=True):
        assert list(row) == ROW
        assert (row["name"], row["precision"], row["accumulate"], row["remat"]) == ("mlp", precision, 2, "none")
        assert (row["optimizer"], row["steps"], row["seed"], row["passed"]) == ("AdamW", 3, 7, True)
        assert (row["error_ratio"] is None) == (precision == "fp64")
        assert (row["tensor_ratio"] is None) == (row["tensor_worst"] is None) == (precision == "fp64")
        assert row["first_divergence"] is None


def test_cases_run_with_the_dropout_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []

    def examine(case: Case, *_: object, **__: object) -> Examination:
        rates.extend(module.p for module in case.torch_model().modules() if isinstance(module, torch.nn.Dropout))
        return examination(Verdict(0.0, 0.0, "w", 0.0, None, ()))

    monkeypatch.setattr("parity.cli.examine", examine)
    path = tmp_path / "parity.json"
    assert main(["run", "mlp", "cnn-bn", "--precision", "fp64", "--dropout", "0.5", "--json", str(path)]) == 0
    assert rates == [0.5, 0.5]
    assert [row["dropout"] for row in json.loads(path.read_text())["cases"]] == rates
    assert main(["run", "mlp", "--precision", "fp64", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["cases"][0]["dropout"] is None


def test_a_case_that_differs_exits_1_and_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flax_epsilon = dataclasses.replace(gpt2_case.CONFIG, layer_norm_epsilon=1e-6)
    monkeypatch.setitem(CASES, "gpt2", lambda: gpt2_case.case(flax_epsilon))
    path = tmp_path / "parity.json"
    assert main(["run", "gpt2", "--precision", "fp64", "--steps", "2", "--json", str(path)]) == 1
    assert "gradient, transformer.h." in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["passed"], written["failed"]) == (0, 1)
    assert written["cases"][0]["grad_rel_max"] > 1e-6
    assert written["cases"][0]["stage"].startswith("loss: ")
    first = written["cases"][0]["first_divergence"]
    assert first["torch"] == "transformer.h.0.ln_1: aten.native_layer_norm (aten.add)"
    assert first["jax_source"].startswith("jaxtrain/models/layers/layer_norm.py:")


def test_locate_exits_1_and_shows_both_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flax_epsilon = dataclasses.replace(gpt2_case.CONFIG, layer_norm_epsilon=1e-6)
    monkeypatch.setitem(CASES, "gpt2", lambda: gpt2_case.case(flax_epsilon))
    assert main(["locate", "gpt2"]) == 1
    out = capsys.readouterr().out
    headline, operation, theirs, built, ours, *_ = out.splitlines()
    assert headline.startswith("gpt2 differs in 2 steps")
    assert operation.split("  ")[-1] == "transformer.h.0.ln_1: aten.native_layer_norm (aten.add)"
    assert theirs.endswith("hidden_states = self.ln_1(hidden_states)")
    assert built.endswith("self.ln_1 = nn.LayerNorm(hidden_size, eps=config.layer_norm_epsilon)")
    assert "jaxtrain/models/layers/layer_norm.py:" in ours


def test_locate_exits_0_where_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locate", "mlp", "--seed", "1", "--dropout", "0.2"]) == 0
    assert capsys.readouterr().out.startswith("mlp does not differ in 2 steps")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["run", "gtp2"], "unknown case 'gtp2': did you mean 'gpt2'?"),
        (["run", "curve.py"], "'curve.py' names no case: add it, as in curve.py::case"),
        (["run", "xyz"], "unknown case 'xyz': choose one of mlp, cnn, cnn-bn, gpt2"),
        (["run", "--precision", "fp64,fp7"], "--precision must be fp64, fp32, bf16, fp16, "),
        (["run", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["run", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (
            ["run", "mlp", "--accumulate", "3"],
            "the 64 rows of mlp are not divisible by accumulate 3: use one of 1, 2, 4",
        ),
        (["run", "mlp", "--remat", "some"], "remat 'some' is unknown: choose one of none, full"),
        (["run", "mlp", "--json", "/nowhere/a.json"], "'/nowhere/a.json' cannot be written: name a file"),
        (["run", "mlp", "--dropout", "1"], "--dropout must be in [0, 1), got 1.0"),
        (["run", "autograd.cubic", "--dropout", "0.1"], "autograd.cubic has no dropout: leave it out, or name only"),
        (["run", "--rtol=1"], "unrecognized arguments: --rtol=1"),
        (["locate", "gtp2"], "unknown case 'gtp2': did you mean 'gpt2'?"),
        (["locate"], "the following arguments are required: CASE"),
        (["locate", "autograd.cubic", "--dropout", "0.1"], "autograd.cubic has no dropout: leave it out"),
        (["walk"], "no command 'walk': choose one of list, run, locate"),
        (["mutete"], "no command 'mutete', did you mean 'mutate'"),
        (["record", "mlp"], "a folder is required: parity record CASE --out DIR"),
        (["mutate"], "a function is required: parity mutate FILE.py::FACTORY"),
    ],
)
def test_wrong_usage_exits_2_with_one_line_before_anything_runs(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("parity.cli.examine", pytest.fail)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert err.startswith("parity: ")
    assert err.count("\n") == 1
    assert "held" not in out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mlp", "--accumulate", "3", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_one_line_that_names_the_extra(package: str) -> None:
    program = f"import sys; sys.modules['{package}'] = None; from parity.cli import main; sys.exit(main(['run']))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.removeprefix("importing\n") == (
        f"parity: {package} is not installed: pip install 'jaxtrain[parity]'\n"
    )


def test_nonfinite_numbers_are_null_in_valid_json() -> None:
    verdict = Verdict(math.inf, math.inf, "w", math.inf, math.inf, ("gradient, w: inf apart",))
    result = Result(CASES["mlp"](), "fp32", Settings(), examination(verdict))
    written = json.dumps(document([result]), allow_nan=False)
    row = json.loads(written)["cases"][0]
    assert (row["loss_rel"], row["error_ratio"], row["passed"]) == (None, None, False)


def test_every_case_has_a_summary_and_its_own_name() -> None:
    assert list(SUMMARIES) == list(CASES)
    assert [make().name for make in CASES.values()] == list(CASES)


CASE_FILE = """
import parity
from parity.cases.built_in.autograd_case import cubic

ready = cubic()


def wrong():
    def loss_fn(params, batch, rng):
        return ready.loss_fn({"x": 1.1 * params["x"]}, batch, rng)

    import dataclasses

    return dataclasses.replace(ready, name="wrong", loss_fn=loss_fn)


def broken():
    def loss_fn(params, batch, rng):
        return ready.loss_fn({"x": params["x"].reshape(7, 7)}, batch, rng)

    import dataclasses

    return dataclasses.replace(ready, name="broken", loss_fn=loss_fn)


number = 3
unnamed = parity.Case(**{**vars(ready), "names": None, "name": "unnamed"})
"""


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_cases.py"
    path.write_text(CASE_FILE)
    return path


def test_a_users_case_is_specified_by_its_file(case_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = case_file.with_suffix(".html")
    assert main(["run", f"{case_file}::ready", "--precision", "fp64", "--steps", "2", "--html", str(page)]) == 0
    assert "1 check held" in page.read_text()
    capsys.readouterr()
    assert main(["run", f"{case_file}::wrong", "--precision", "fp64,fp32", "--steps", "2", "--html", str(page)]) == 1
    assert "wrong fp32 not run: wrong differs in fp64" in capsys.readouterr().out
    text = page.read_text()
    assert "1 differs" in text
    # The page shows the wrong line.
    assert "1.1 * params" in text
    assert main(["locate", f"{case_file}::wrong"]) == 1
    assert "1.1 * params" in capsys.readouterr().out


def test_a_check_reports_its_stages_and_stops_after_a_first_step_that_differs(case_file: Path) -> None:
    reported: list[str] = []
    assert parity.check(own_case(f"{case_file}::ready"), steps=2, progress=reported.append).passed
    equal = reported.index("fp64: the first loss, gradients and update are equal")
    assert reported[:equal] == [
        "fp64: matching weights",
        "fp64: PyTorch, update 1 of 1",
        "fp64: JAX compiles",
    ]
    assert reported[-1] == "fp64: JAX, update 2 of 2"
    reported.clear()
    assert not parity.check(own_case(f"{case_file}::wrong"), progress=reported.append).passed
    assert not any("update 2" in line for line in reported)


def test_without_a_terminal_a_stage_that_lasts_is_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.report.live_status.PATIENCE", 1e-3)
    # Not `capsys`, which loses what another thread writes while it reads.
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    with waiting(Console(quiet=True), "gpt2"):
        for stage, line in {"fp64: JAX, update 2 of 3": "2 of 3", "fp32: JAX compiles": "compiles"}.items():
            report(stage)
            while line not in err.getvalue():
                time.sleep(1e-3)
            if line == "2 of 3":
                report("fp64: JAX, update 3 of 3")
    assert err.getvalue().splitlines()[-2:] == ["gpt2 fp64: JAX, update 2 of 3", "gpt2 fp32: JAX compiles"]


def test_an_error_in_a_loss_fn_is_shown_in_the_users_frames(
    case_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="cannot reshape") as raised:
        parity.check(own_case(f"{case_file}::broken"), steps=1)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames][1:] == ["call", "loss_fn"]  # the first is this function's

    assert main(["run", f"{case_file}::broken", "--precision", "fp64"]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"parity: my_cases.py:\d+: TypeError: cannot reshape", shown)
    assert shown.endswith(" (--debug shows the traceback)")

    with pytest.raises(TypeError) as raised:
        main(["run", f"{case_file}::broken", "--precision", "fp64", "--debug"])
    assert len(traceback.extract_tb(raised.value.__traceback__)) > 5


def test_omitted_names_are_proposed_and_printed(case_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{case_file}::unnamed", "--precision", "fp64", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "unnamed is compared under these names; copy them into its names:" in out
    assert '"x": TorchParam("x", AS_IS)' in out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("number", "'number' in my_cases.py is not a case: its cases are ready, unnamed"),
        ("nothing", "'nothing' in my_cases.py is not a case: its cases are ready, unnamed"),
    ],
)
def test_an_invalid_case_of_a_user_is_refused_in_one_line(
    name: str, expected: str, case_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(case_file.parent)
    assert main(["run", f"my_cases.py::{name}"]) == 2
    assert capsys.readouterr().err == f"parity: {expected}\n"
    assert main(["run", "no_such.py::case"]) == 2
    assert capsys.readouterr().err == "parity: there is no file 'no_such.py': name a case as path/to/file.py::case\n"


def test_prove_reports_proven_and_unproven_tensors(capsys):
    assert main(["prove", "gpt2"]) == 0
    expected = capsys.readouterr().out
    assert "gpt2: 29 tensors and 0 buffers of PyTorch correspond to 16 leaves of JAX, each used once" in expected
    assert "tied: lm_head.weight is transformer.wte.weight" in expected
    assert "change both losses alike" in expected
