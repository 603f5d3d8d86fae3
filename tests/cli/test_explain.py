"""`jaxtrain explain` from the command line."""

import json
import shlex

import pytest

from jaxtrain.cli import main


def explain(capsys, command):
    status = main(["explain", *shlex.split(command)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_passes_of_a_run_are_printed_with_reasons_and_gains(capsys):
    status, out, _ = explain(capsys, "gpt-stdlib --precision bf16 --unroll")
    assert status == 0
    assert out.startswith("gpt-stdlib · bf16 · cpu\n")
    words = " ".join(out.split())
    assert "the loss function, from the inside" in words
    assert words.index("precision") < words.index("unroll") < words.index("losses_in_float32")
    assert "predicted" in words
    assert "split_products" not in words


def test_the_passes_for_a_gpu_are_those_of_its_programs(capsys):
    _, out, _ = explain(capsys, "gpt-stdlib --precision fp8 --accumulate 2 --device h100 --json")
    phases = json.loads(out)
    names = [x["name"] for phase in phases for x in phase["passes"]]
    assert "fuse_casts" in names
    assert "cpu_products" not in names
    assert all({"name", "does", "why", "after", "platforms", "gain"} <= x.keys() for p in phases for x in p["passes"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gpt-stdlib --device h1000", "h1000"),
        ("gpt-stdlib --precision bf17", "bf17"),
        ("gpt-stdlb", "no recipe 'gpt-stdlb'"),
    ],
)
def test_mistakes_are_one_line(capsys, command, message):
    status, out, err = explain(capsys, command)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
