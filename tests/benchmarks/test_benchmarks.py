"""The benchmarks compare the work before they time it, each engine in a process of its own."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import cli, devices, host, run, suites, updates
from benchmarks.engines import engine
from benchmarks.features import FEATURES, MICRO_STEPS
from benchmarks.job import Job
from benchmarks.suites import SUITES, Suite, exponents, ratios, slope
from benchmarks.timing import Timing, timed
from benchmarks.workloads import SMALL, WORKLOADS
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.recipes import RECIPES

SIZES = {"vocab_size": 17, "width": 8, "depth": 1, "heads": 2, "rows": 4, "length": 4}
# A forward and twice as much backward: blocks and logits, and attention's two products.
FLOPS = 3 * 2 * 4 * 4 * (12 * 8**2 + 17 * 8 + 2 * 4 * 8)


def short(engine_name, **settings):
    return Job("gpt2-tiny", engine_name, sizes=SIZES, **settings)


def timing(job, wall, losses=(3.0, 2.9)):
    return Timing(job, np.array(wall), np.array(wall), [*losses], "cpu", None, None, None, 1)


@pytest.mark.slow
def test_both_engines_are_timed_on_the_same_work(monkeypatch, tmp_path, capsys):
    groups = [[short("jax"), short("torch_eager")]]
    monkeypatch.setitem(SUITES, "short", Suite(groups, rounds=2, ceilings=[]))
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
    assert jax_row["compile_s"] > jax_row["warm_compile_s"] > 0
    assert document["ratios"][0]["jax_vs_eager"] == torch_row["lower_decile_s"] / jax_row["lower_decile_s"]
    assert document["ratios"][0]["jax_vs_compile"] is None
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "gpt2-tiny" in files["html"].read_text()
    assert "eager PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "job", [short("jax", accumulate=2), short("jax", remat="full"), short("jax", precision="bf16")]
)
def test_engines_take_the_same_steps_under_every_setting(job):
    ours, theirs = (engine(each, WORKLOADS[job.workload]) for each in (job, job.by("torch_eager")))
    for _ in range(3):
        ours.step()
        theirs.step()
    assert len(set(ours.losses)) == 3
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=suites.SAME * suites.EPSILON[job.precision])
    assert ours.flops == FLOPS


@pytest.mark.parametrize("feature", [*FEATURES, "bare"])
def test_features_change_no_loss_but_for_clipping(feature):
    plain, other = (engine(short("jax", feature=f), WORKLOADS["gpt2-tiny"]) for f in ("no clipping", feature))
    for _ in range(2):
        plain.step()
        other.step()
    np.testing.assert_allclose(plain.losses[0], other.losses[0], rtol=1e-6)
    clips = "clip_norm" not in FEATURES.get(feature, {}) and feature != "bare"
    assert (abs(plain.losses[1] - other.losses[1]) > 1e-6) == clips


def test_different_work_is_refused(monkeypatch, capsys):
    wrong = dataclasses.replace(WORKLOADS["gpt2-tiny"], proof="wrong")
    monkeypatch.setitem(WORKLOADS, "gpt2-tiny", wrong)

    def other(name):
        from jaxtrain.models import GPT2Config
        from parity.cases import gpt2

        assert name == "wrong"
        config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        return gpt2.case(dataclasses.replace(config, layer_norm_epsilon=1e-6), reference=config, rows=2, tokens=5)

    monkeypatch.setattr("parity.cases.case_of", other)
    assert cli.main(["cpu"]) == 1
    assert "do not do the same work" in capsys.readouterr().err


def test_losses_that_part_at_full_size_are_refused():
    ours, theirs = timing(short("jax"), [1.0]), timing(short("torch_eager"), [1.0], (3.0, 2.9001))
    with pytest.raises(RunFailed, match="other work"):
        suites._check_same([ours, theirs])
    suites._check_same([ours, timing(short("torch_eager"), [1.0], (3.0, 2.9 * (1 + 1e-7)))])


def test_an_engine_that_dies_says_its_last_line():
    with pytest.raises(RunFailed, match=r"by torch_eager.*remat dots has no counterpart"):
        timed([short("torch_eager", remat="dots")], 1, lambda _: None)


def test_a_ratio_is_of_lower_deciles_and_the_best_is_the_fastest():
    walls = {"jax": [2.0, 2.0, 9.0], "torch_eager": [3.0] * 3, "torch_compile": [1.0, 50.0, 50.0]}
    (ratio,) = ratios([timing(short(name), wall) for name, wall in walls.items()])
    assert ratio["jax_vs_best"] == ratio["jax_vs_eager"] == 1.5
    assert ratio["jax_vs_compile"] == pytest.approx((1.0 + 49.0 * 0.2) / 2)


def test_an_exponent_is_the_slope_of_the_logarithms():
    found = [timing(Job("gpt2-tiny", "jax", sizes={"rows": n}), [3.0 * n**1.5]) for n in (2, 4, 8)]
    found += [timing(Job("gpt2-tiny", "jax", accumulate=k, sizes={"rows": 12 * k}), [2.0 * k]) for k in (2, 4)]
    windows, rows = exponents(found)
    assert rows == {"engine": "jax", "size": "rows", "exponent": pytest.approx(1.5)}
    assert windows == {"engine": "jax", "size": "micro-batches", "exponent": pytest.approx(1.0)}


def test_state_falls_as_devices_grow(monkeypatch):
    monkeypatch.setattr(devices, "SIZES", {**devices.SIZES, "width": 32, "depth": 1})
    (one, two) = (devices._counted(n) for n in (1, 2))
    assert slope([(1, one["state"]), (2, two["state"])]) == pytest.approx(-1, abs=0.01)


def test_wrong_usage_is_one_line(tmp_path, capsys):
    for args in (["gpu2"], ["cpu", "--json", str(tmp_path / "nowhere" / "f.json")]):
        assert cli.main(args) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_pytorch_refuses_what_it_has_not():
    with pytest.raises(UserError, match="no counterpart"):
        engine(short("torch_eager", remat="dots"), WORKLOADS["gpt2-tiny"])


def test_a_window_is_its_micro_steps_and_an_update():
    whole, by_hand = (
        engine(short("jax", accumulate=2, feature=feature), WORKLOADS["gpt2-tiny"]) for feature in ("", MICRO_STEPS)
    )
    for _ in range(3):
        whole.step()
        by_hand.step()
    np.testing.assert_allclose(by_hand.losses, whole.losses, rtol=1e-6)


@pytest.mark.parametrize("feature", sorted({*run.STEPS, *run.SAVES}))
def test_a_run_is_timed_with_guards_and_with_saves(feature, monkeypatch):
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "seq_len": 8, "batch_size": 2, "log_every": 2}
    monkeypatch.setitem(RECIPES, run.RECIPE, dataclasses.replace(RECIPES[run.RECIPE], **small))
    built = run.engine(Job(run.WORKLOAD, "jax", feature=feature))
    for _ in range(3):
        built.prepare()
        built.step()


@pytest.mark.parametrize("update", updates.UPDATES)
def test_an_update_is_timed_in_every_engine_on_as_many_parameters(update):
    sizes = {"vocab_size": 16, "width": 8, "depth": 2, "length": 4}
    with jax.numpy_dtype_promotion("standard"):  # as optax expects it
        for engine_name in updates.ENGINES:
            built = updates.engine(Job(update, engine_name, sizes=sizes))
            built.step()
            built.step()
    # Embeddings, a norm, and 12 n² + 13 n a block.
    assert updates.parameters(sizes) == 16 * 8 + 4 * 8 + 2 * 8 + 2 * (12 * 64 + 13 * 8)
    assert updates.parameters(SMALL) == 124_475_904


@pytest.mark.parametrize("engine_name", host.ENGINES)
def test_inputs_are_read_by_both(engine_name):
    for timed_one in timed([Job("input-images", engine_name)], rounds=1, told=lambda text: None):
        row = suites.rows([timed_one], [])[0]
        assert row["per_s"] == host.examples("input-images") / row["lower_decile_s"]
        assert row["unit"] == "examples"


def test_a_feature_may_change_the_steps_after_the_first():
    bare, clipped = (
        timing(Job("gpt2-tiny", "jax", feature=f), [1.0], losses)
        for f, losses in (
            ("bare", (3.0, 2.9)),
            ("", (3.0, 2.8)),
        )
    )
    suites._check_same([bare, clipped])
    with pytest.raises(RunFailed):
        suites._check_same([bare, timing(Job("gpt2-tiny", "jax"), [1.0], (2.9, 2.8))])
    with pytest.raises(RunFailed):
        suites._check_same([clipped, timing(Job("gpt2-tiny", "torch_eager"), [1.0], (3.0, 2.9))])
