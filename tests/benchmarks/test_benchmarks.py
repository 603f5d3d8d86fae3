"""The benchmarks compare the work before they time it."""

import dataclasses
import json

import pytest

from benchmarks import cli, measure, suite
from benchmarks.workloads import SUITES, WORKLOADS, Workload
from jaxtrain.models import GPT2Config
from parity.cases import gpt2


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "TURN", 2)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    workload = Workload(lambda: gpt2.case(config, reference=config, rows=2, tokens=5), "tokens", 4)
    monkeypatch.setitem(WORKLOADS, "short", workload)
    monkeypatch.setitem(SUITES, "short", ("short",))
    return config


def test_both_engines_are_timed_on_the_same_work(short, tmp_path, capsys):
    assert cli.main(["short", "--json", str(tmp_path / "figures.json")]) == 0
    document = json.loads((tmp_path / "figures.json").read_text())
    assert [row["engine"] for row in document["rows"]] == ["jax", "torch_eager"]
    for row in document["rows"]:
        assert 0 < row["min_s"] <= row["lower_decile_s"] <= row["median_s"]
        # A forward and twice as much backward: blocks and logits, and attention's two products.
        width, length = 8, 4
        assert row["flops"] == 3 * 2 * 2 * length * (12 * width**2 + 17 * width + 2 * length * width)
    jax_row, torch_row = document["rows"]
    assert document["ratios"][0]["jax_vs_eager"] == torch_row["lower_decile_s"] / jax_row["lower_decile_s"]
    assert "short" in capsys.readouterr().out


def test_different_work_is_refused(short, monkeypatch, tmp_path, capsys):
    other = dataclasses.replace(short, layer_norm_epsilon=1e-6)
    case = gpt2.case(other, reference=short, rows=2, tokens=5)
    monkeypatch.setitem(WORKLOADS, "short", Workload(lambda: case, "tokens", 4))
    assert suite.measure("short", WORKLOADS["short"]) is None
    assert cli.main(["short", "--json", str(tmp_path / "figures.json")]) == 1
    assert not (tmp_path / "figures.json").exists()
    assert "do not do the same work" in capsys.readouterr().out


def test_wrong_usage_is_one_line(tmp_path, capsys):
    for args in (["gpu2"], ["cpu", "--json", str(tmp_path / "nowhere" / "f.json")]):
        assert cli.main(args) == 2
        assert capsys.readouterr().err.count("\n") == 1
