"""Engines, features, updates and inputs do the specified work, and figures are computed as documented."""

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
EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-7, "bf16_compute": 2.0**-7}
# The backward pass takes twice the FLOPs of the forward pass: blocks, logits and the two products of attention.
FLOPS = 3 * 2 * 4 * 4 * (12 * 8**2 + 17 * 8 + 2 * 4 * 8)


def small_job(engine_name, **settings):
    return Job("gpt2-tiny", engine_name, sizes=SIZES, **settings)


def timing(job, wall):
    return Timing(job, np.array(wall), np.array(wall), "cpu", None, None, None, 1, turns=np.array(wall))


@pytest.mark.parametrize(
    "job",
    [
        small_job("jax", accumulate=2),
        small_job("jax", precision="bf16"),
        small_job("jax", remat="full"),
        small_job("jax", precision="bf16_compute", accumulate=2),
    ],
)
def test_engines_take_the_same_steps_under_every_setting(job):
    ours, theirs = (engine(each, WORKLOADS[job.workload]) for each in (job, job.with_engine("torch_eager")))
    for _ in range(3):
        ours.step()
        theirs.step()
    assert len(set(ours.losses)) == 3
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=8 * EPSILON[job.precision])
    assert ours.flops == FLOPS


def losses_of_two_steps(feature):
    built = engine(small_job("jax", feature=feature), WORKLOADS["gpt2-tiny"])
    built.step()
    built.step()
    return built.losses


@pytest.mark.nightly
def test_features_change_the_losses_only_by_clipping():
    plain = losses_of_two_steps("no clipping")
    for feature in {*FEATURES, "bare"} - {"no clipping"}:
        other = losses_of_two_steps(feature)
        np.testing.assert_allclose(plain[0], other[0], rtol=1e-6, err_msg=feature)
        clips = "clip_norm" not in FEATURES.get(feature, {}) and feature != "bare"
        assert (abs(plain[1] - other[1]) > 1e-6) == clips, feature


def test_a_failed_engine_is_reported_with_its_last_line_of_output():
    with pytest.raises(RunFailed, match=r"by torch_eager.*remat 'dots' has no counterpart"):
        time_jobs([small_job("torch_eager", remat="dots")], 1, Budget(300), lambda _: None)


def test_ratios_are_medians_over_rounds_and_the_best_engine_is_the_fastest():
    # A load that slows both in the same rounds is in neither ratio.
    load = np.array([1.0, 1.0, 7.0, 1.0, 5.0, 1.0])
    walls = {"jax": 2 * load, "torch_eager": 3 * load, "torch_compile": [8.0, 4.0, 14.0, 2.0, 10.0, 5.0]}
    (ratio,) = ratios([timing(small_job(name), wall) for name, wall in walls.items()])
    assert ratio["jax_vs_best"] == ratio["jax_vs_compile"] == 1.5
    assert ratio["jax_vs_eager"] == 1.5
    assert ratio["intervals"] == {"torch_eager": (1.5, 1.5), "torch_compile": (1.0, 4.0)}


def test_a_ratio_names_the_variant_of_jax_and_compares_it_with_plain_pytorch():
    jobs = [small_job("jax"), small_job("jax", feature="loop"), small_job("torch_eager")]
    found = ratios([timing(job, [seconds] * 6) for job, seconds in zip(jobs, (1.0, 2.0, 4.0), strict=True)])
    assert [(ratio["feature"], ratio["jax_vs_eager"]) for ratio in found] == [("", 4.0), ("loop", 2.0)]


def test_the_interval_of_a_median_contains_it_as_often_as_it_says():
    drawn = np.random.default_rng(0).exponential(size=(2000, 20))
    ends = np.array([figures.median_interval(row) for row in drawn])
    held = np.mean((ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1]))
    assert 0.95 <= held < 0.98  # 0.959 exactly


def test_exponents_are_slopes_of_logarithms():
    timings = [timing(Job("gpt2-tiny", "jax", sizes={"rows": n}), [3.0 * n**1.5]) for n in (2, 4, 8)]
    timings += [timing(Job("gpt2-tiny", "jax", accumulate=k, sizes={"rows": 12 * k}), [2.0 * k]) for k in (2, 4)]
    windows, rows = exponents(timings)
    assert rows == {"engine": "jax", "size": "rows", "exponent": pytest.approx(1.5)}
    assert windows == {"engine": "jax", "size": "micro-batches", "exponent": pytest.approx(1.0)}


def test_memory_of_the_state_is_inversely_proportional_to_the_number_of_devices(monkeypatch):
    monkeypatch.setattr(devices, "SIZES", {**devices.SIZES, "width": 32, "depth": 1})
    (one, two) = (devices._memory_on(n) for n in (1, 2))
    assert slope([(1, one["state"]), (2, two["state"])]) == pytest.approx(-1, abs=0.01)


def test_a_remat_policy_without_a_counterpart_in_pytorch_is_refused():
    with pytest.raises(UserError, match="no counterpart"):
        engine(small_job("torch_eager", remat="dots"), WORKLOADS["gpt2-tiny"])


def test_a_window_equals_separate_micro_steps():
    window, micro_steps = (
        engine(small_job("jax", accumulate=2, feature=feature), WORKLOADS["gpt2-tiny"]) for feature in ("", MICRO_STEPS)
    )
    for _ in range(3):
        window.step()
        micro_steps.step()
    np.testing.assert_allclose(micro_steps.losses, window.losses, rtol=1e-6)


def test_pytorch_compiles_the_model_of_the_compiled_engine_alone(monkeypatch):
    compiled = []
    monkeypatch.setattr("torch.compile", lambda model: compiled.append(model) or model)
    for name, count in (("torch_eager", 0), ("torch_compile", 1)):
        built = engine(small_job(name), WORKLOADS["gpt2-tiny"])
        assert len(compiled) == count
        assert (built.compile_s is not None) == (built.warm_compile_s is not None) == bool(count)


@pytest.mark.parametrize("feature", sorted({*run.STEPS, *run.SAVES}))
def test_runs_with_guards_and_saves_can_be_timed(feature, monkeypatch):
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "seq_len": 8, "batch_size": 2, "log_every": 2}
    recipes = {run.RECIPE: dataclasses.replace(RECIPES[run.RECIPE], **small)}
    monkeypatch.setattr("jaxtrain.recipes.RECIPES", recipes)
    built = run.engine(Job(run.WORKLOAD, "jax", feature=feature))
    for _ in range(3):
        built.prepare()
        built.step()


@pytest.mark.parametrize("update", updates.UPDATES)
def test_updates_run_in_every_engine_on_the_documented_number_of_parameters(update):
    sizes = {"vocab_size": 16, "width": 8, "depth": 2, "length": 4}
    with jax.numpy_dtype_promotion("standard"):  # as optax expects it
        for engine_name in updates.ENGINES:
            built = updates.engine(Job(update, engine_name, sizes=sizes))
            built.step()
            built.step()
    # Embeddings, a norm, and 12 n² + 13 n per block.
    assert updates.parameters(sizes) == 16 * 8 + 4 * 8 + 2 * 8 + 2 * (12 * 64 + 13 * 8)
    assert updates.parameters(SMALL) == 124_475_904


@pytest.mark.parametrize("engine_name", host.ENGINES)
def test_inputs_are_read_by_both_loaders(engine_name):
    for measured in time_jobs([Job("input-images", engine_name)], 1, Budget(300), print):
        row = figures.rows([measured], [])[0]
        assert row["per_s"] == host.examples_per_step("input-images") / row["lower_decile_s"]
        assert row["unit"] == "examples"
