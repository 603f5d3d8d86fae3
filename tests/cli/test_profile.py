"""`jaxtrain profile` and `train --profile` from the command line."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.cli.profile import print_table
from jaxtrain.profile.trace import Row, Top

SMALL = "--hidden 32 --batch-size 16 --log-every 2 --eval-every 4 --save-every 4"


def test_a_run_is_profiled_during_training_and_afterwards(capsys):
    assert main(f"train digits-mlp --steps 8 {SMALL} --profile 3:6 --out run".split()) == 0
    out = capsys.readouterr().out
    assert " ms per step, in traced operations" in out
    assert "models/mlp.py:" in out
    (trace,) = Path("run/profile").rglob("*.xplane.pb")
    assert f"trace: {trace}" in out
    assert [*Path("run/profile").rglob("*.trace.json.gz")]
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if "profile" not in path.parts}
    assert main(["profile", "run", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "run · digits-mlp · cpu · 3 steps",
        "matmul",
        "elementwise",
        "idle",
        "view it with: xprof --logdir run",
    ):
        assert expected in out
    after = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if "profile" not in path.parts}
    assert after == before
    assert len([*Path("run/profile").rglob("*.xplane.pb")]) == 2
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 4, 6, 8]


def test_long_names_of_operations_hide_no_number(capsys):
    longest = Top("multiply_convert_fusion" * 9, "attention/formula.py:108", 0.125, 3)
    rows = [Row("elementwise", 0.5, 1.0, 7, [longest])]
    print_table(Console(width=80), rows, 1, "title")
    lines = capsys.readouterr().out.splitlines()
    (own,) = [line for line in lines if "multiply_" in line]
    assert "…   125.000    25.0%          3   attention/formula.py:108" in own
    assert max(map(len, lines)) <= 80


def test_a_trace_without_operations_is_replaced_by_an_estimate(capsys, monkeypatch):
    assert main(f"train digits-mlp --steps 4 {SMALL} --out run".split()) == 0
    monkeypatch.setattr("jaxtrain.cli.profile.time_table", lambda trace, hlo: [])
    capsys.readouterr()
    assert main(["profile", "run", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "the trace has no operations" in out
    assert " ms per step, wall-clock time" in out
    assert "estimated by the roofline of cpu, not measured" in out
    assert "in traced operations" not in out
    assert "idle" not in out
    assert re.search(r"^ +dot_general +\S+ +\S+% +\d+ +models/", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("profile", "the following arguments are required: DIR; see jaxtrain profile --help"),
        ("profile nowhere", "nowhere holds no run"),
        ("profile nowhere --steps 0", "--steps must be positive, got 0"),
        (
            "train digits-mlp --steps 8 --profile 8",
            "--profile must be a range A:B of steps from 1 to 8, got '8': use one such as 10:20",
        ),
        ("train digits-mlp --steps 8 --profile 3:3", "must be a range A:B of steps from 1 to 8, got '3:3'"),
        ("train digits-mlp --steps 8 --profile 5:90", "must be a range A:B of steps from 1 to 8, got '5:90'"),
    ],
)
def test_wrong_usage_is_a_one_line_error(command, message, capsys):
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
