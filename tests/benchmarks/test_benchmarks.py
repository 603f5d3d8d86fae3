"""Engines, features, updates and inputs do the work that they name, and figures are computed as documented."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import devices, figures, host, run, updates
from benchmarks.budget import Budget
from benchmarks.engines import engine
from benchmarks.features import FEATURES, MICRO_STEPS
from benchmarks.figures import exponents, ratios, slope
from benchmarks.job import Job
from benchmarks.timing import Timing, time_jobs
from benchmarks.workloads import SMALL, WORKLOADS
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.recipes import RECIPES

SIZES = {"vocab_size": 17, "width": 8, "depth": 1, "heads": 2, "rows": 4, "length": 4}
EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-7}
# A forward and twice as much backward: blocks and logits, and attention's two products.
FLOPS = 3 * 2 * 4 * 4 * (12 * 8**2 + 17 * 8 + 2 * 4 * 8)


def short(engine_name, **settings):
    return Job("gpt2-tiny", engine_name, sizes=SIZES, **settings)


def timing(job, wall):
    return Timing(job, np.array(wall), np.array(wall), "cpu", None, None, None, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "job", [short("jax", accumulate=2), short("jax", remat="full"), short("jax", precision="bf16")]
)
def test_engines_take_the_same_steps_under_every_setting(job):
    ours, theirs = (engine(each, WORKLOADS[job.workload]) for each in (job, job.with_engine("torch_eager")))
    for _ in range(3):
        ours.step()
        theirs.step()
    assert len(set(ours.losses)) == 3
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=8 * EPSILON[job.precision])
    assert ours.flops == FLOPS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("feature", [*FEATURES, "bare"])
def test_features_change_no_loss_but_for_clipping(feature):
    plain, other = (engine(short("jax", feature=f), WORKLOADS["gpt2-tiny"]) for f in ("no clipping", feature))
    for _ in range(2):
        plain.step()
        other.step()
    np.testing.assert_allclose(plain.losses[0], other.losses[0], rtol=1e-6)
    clips = "clip_norm" not in FEATURES.get(feature, {}) and feature != "bare"
    assert (abs(plain.losses[1] - other.losses[1]) > 1e-6) == clips


@pytest.mark.slow
def test_an_engine_that_fails_is_reported_by_its_last_line():
    with pytest.raises(RunFailed, match=r"by torch_eager.*remat 'dots' has no counterpart"):
        time_jobs([short("torch_eager", remat="dots")], 1, Budget(300), lambda _: None)


def test_a_ratio_is_of_lower_deciles_and_the_best_is_the_fastest():
    walls = {"jax": [2.0, 2.0, 9.0], "torch_eager": [3.0] * 3, "torch_compile": [1.0, 50.0, 50.0]}
    (ratio,) = ratios([timing(short(name), wall) for name, wall in walls.items()])
    assert ratio["jax_vs_best"] == ratio["jax_vs_eager"] == 1.5
    assert ratio["jax_vs_compile"] == pytest.approx((1.0 + 49.0 * 0.2) / 2)


def test_an_exponent_is_the_slope_of_the_logarithms():
    timings = [timing(Job("gpt2-tiny", "jax", sizes={"rows": n}), [3.0 * n**1.5]) for n in (2, 4, 8)]
    timings += [timing(Job("gpt2-tiny", "jax", accumulate=k, sizes={"rows": 12 * k}), [2.0 * k]) for k in (2, 4)]
    windows, rows = exponents(timings)
    assert rows == {"engine": "jax", "size": "rows", "exponent": pytest.approx(1.5)}
    assert windows == {"engine": "jax", "size": "micro-batches", "exponent": pytest.approx(1.0)}


@pytest.mark.slow
def test_state_falls_as_devices_grow(monkeypatch):
    monkeypatch.setattr(devices, "SIZES", {**devices.SIZES, "width": 32, "depth": 1})
    (one, two) = (devices._memory_on(n) for n in (1, 2))
    assert slope([(1, one["state"]), (2, two["state"])]) == pytest.approx(-1, abs=0.01)


def test_pytorch_refuses_a_policy_without_counterpart():
    with pytest.raises(UserError, match="no counterpart"):
        engine(short("torch_eager", remat="dots"), WORKLOADS["gpt2-tiny"])


@pytest.mark.slow
def test_a_window_is_its_micro_steps_and_an_update():
    window, micro_steps = (
        engine(short("jax", accumulate=2, feature=feature), WORKLOADS["gpt2-tiny"]) for feature in ("", MICRO_STEPS)
    )
    for _ in range(3):
        window.step()
        micro_steps.step()
    np.testing.assert_allclose(micro_steps.losses, window.losses, rtol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("feature", sorted({*run.STEPS, *run.SAVES}))
def test_a_run_is_timed_with_guards_and_with_saves(feature, monkeypatch):
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "seq_len": 8, "batch_size": 2, "log_every": 2}
    monkeypatch.setitem(RECIPES, run.RECIPE, dataclasses.replace(RECIPES[run.RECIPE], **small))
    built = run.engine(Job(run.WORKLOAD, "jax", feature=feature))
    for _ in range(3):
        built.prepare()
        built.step()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", host.ENGINES)
def test_inputs_are_read_by_both_loaders(engine_name):
    for measured in time_jobs([Job("input-images", engine_name)], 1, Budget(300), print):
        row = figures.rows([measured], [])[0]
        assert row["per_s"] == host.examples_per_step("input-images") / row["lower_decile_s"]
        assert row["unit"] == "examples"
