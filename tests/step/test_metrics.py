"""The metrics of a training step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests.step.regression import BATCH32, squared_error


def test_metrics_are_weighted_exactly():
    def loss_fn(params, batch, rng):
        weight = batch["weight"].sum()
        metrics = {
            "own": jt.Loss(batch["own"].sum(), (batch["own"] > 0).astype(np.float32).sum()),
            "mean": (batch["x"] * batch["weight"]).sum() / jnp.maximum(weight, 1),
            "none": jt.Loss(batch["x"].sum() * 0, 0.0),
        }
        return jt.Loss((params * batch["x"] * batch["weight"]).sum(), weight), metrics

    batch = {
        "x": np.array([1, 5, 2, 2, 9, 9], np.float32),
        "weight": np.array([1, 0, 1, 2, 0, 0], np.float32),
        "own": np.array([0, 0, 4, 0, 2, 3], np.float32),
    }
    for k in (1, 3):
        step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate=k)
        _, metrics = step(step.init(jnp.ones(())), batch)
        assert float(metrics["loss"]) == (1 + 2 + 4) / 4
        assert float(metrics["weight"]) == 4
        assert float(metrics["mean"]) == (1 + 2 + 4) / 4
        assert float(metrics["own"]) == (4 + 2 + 3) / 3
        assert float(metrics["none"]) == 0
        assert all(np.shape(value) == () for value in metrics.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 2])
def test_metrics_may_be_integers_booleans_and_python_numbers(k, precision):
    def loss_fn(params, batch, rng):
        correct = batch > 1
        metrics = {"accuracy": jt.Loss(correct.sum(), len(batch)), "any": correct.any(), "half": 0.5}
        return jt.Loss((params * batch).sum(), weight=len(batch)), metrics

    step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate=k, precision=precision)
    state, metrics = step(step.init(jnp.ones(())), np.array([1, 2, 3, 4], np.float32))
    assert float(metrics["accuracy"]) == 0.75
    assert float(metrics["half"]) == 0.5
    assert float(metrics["any"]) == 1
    sums = jt.eval_step(loss_fn, precision=precision)(state, np.array([1, 2, 3, 4], np.float32))
    assert float(sums["accuracy"].total) == 3
    assert float(sums["accuracy"].weight) == 4


@pytest.mark.parametrize("k", [1, 2])
def test_metrics_of_a_float64_model_keep_float64_precision(k):
    def loss_fn(params, batch, rng):
        metrics = {"mean": batch.mean(), "own": jt.Loss(batch.sum(), len(batch)), "half": 0.5}
        return jt.Loss((params * batch).sum(), weight=len(batch)), metrics

    with jax.enable_x64(True):
        step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate=k, precision="fp64")
        batch = np.array([0.1, 0.2, 0.3, 0.4])
        state, metrics = step(step.init(jnp.ones(())), batch)
        sums = jt.eval_step(loss_fn, precision="fp64")(state, batch)
    for name, expected in {"loss": 0.25, "mean": 0.25, "own": 0.25, "half": 0.5}.items():
        assert float(metrics[name]) == pytest.approx(expected, rel=1e-15)
        assert float(sums[name].total / sums[name].weight) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("k", [1, 2])
def test_a_low_precision_metric_is_weighted_in_float32(k):
    def loss_fn(params, batch, rng):
        out = batch["x"] @ params
        return jt.Loss(out.sum(), batch["weight"].sum()), {"largest": out.max()}

    # bfloat16 cannot represent 257 and 771, nor float16 2^17; the mean of ones is 1 all the same.
    for precision, weight in [("bf16", 257), ("fp16", 2**17)]:
        step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate=k, precision=precision)
        batch = {"x": np.ones((2, 1), np.float32), "weight": np.array([weight, 2 * weight], np.float32)}
        state, metrics = step(step.init(jnp.ones(1)), batch)
        assert float(metrics["largest"]) == 1
        sums = jt.eval_step(loss_fn, precision=precision)(state, batch)["largest"]
        assert float(sums.total) == float(sums.weight) == 3 * weight


def test_grad_norm_is_unscaled_and_before_clipping_and_loss_scale_is_the_one_used():
    def loss_fn(params, batch, rng):
        return jt.Loss((batch @ params).sum(), len(batch)), {}

    scaler = jt.dynamic_loss_scale(init_scale=1024.0, growth_interval=1)
    step = jt.train_step(loss_fn, optax.sgd(1.0), accumulate=2, clip_norm=1.0, loss_scale=scaler)
    state = step.init(jnp.zeros(2))
    batch = np.array([[3, 4], [3, 4]], np.float32)
    for scale in (1024, 2048):
        before = np.asarray(state.params).copy()
        state, metrics = step(state, batch)
        assert float(metrics["grad_norm"]) == 5
        assert float(metrics["loss_scale"]) == scale
        np.testing.assert_allclose(before - state.params, [0.6, 0.8], rtol=1e-6)
    assert float(state.loss_scale.scale) == 4096


def test_schedules_count_applied_updates():
    step = jt.train_step(
        lambda params, batch, rng: (jt.Loss(params * batch.sum(), len(batch)), {}),
        optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})),
        accumulate=2,
        loss_scale=jt.dynamic_loss_scale(init_scale=2.0),
    )
    state = step.init(jnp.zeros(()))
    trace = []
    for value in (1, np.inf, 1, np.nan, 1):
        state, _ = step(state, np.full(2, value, np.float32))
        trace.append(float(state.params))
    assert trace == [-1.0, -1.0, -1.5, -1.5, -1.75]


def test_fp16_lowers_its_loss_scale_and_trains():
    def loss_fn(params, batch, rng):
        return squared_error(jnp.tanh(batch["x"] @ params["w"]) @ params["v"], batch)

    step = jt.train_step(loss_fn, optax.adamw(0.03), precision="fp16", accumulate=2, clip_norm=1.0)
    state = step.init({"w": np.full((4, 8), 0.1), "v": np.full((8, 2), 100.0)})
    assert float(state.loss_scale.scale) == 65536
    losses, skipped = [], 0
    for _ in range(30):
        state, metrics = step(state, BATCH32)
        skipped += bool(metrics["skipped"])
        losses.append(float(metrics["loss"]))
    assert 0 < skipped < 20
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {np.dtype(np.float32)}


@pytest.mark.parametrize("k", [1, 2])
def test_a_float16_loss_is_divided_and_scaled_in_float32(k):
    def loss_fn(params, batch, rng):
        error = batch @ params
        return jt.Loss(jnp.vdot(error, error), weight=2.0**17), {}

    # In float16 the weight would be inf and the gradient 0; the scale would be inf as well, and the gradient NaN.
    step = jt.train_step(loss_fn, optax.sgd(2.0**16), accumulate=k, precision="fp16")
    state, metrics = step(step.init(jnp.array([1.0, 2.0])), np.array([[1, 1], [1, -1]], np.float32))
    assert not bool(metrics["skipped"])
    np.testing.assert_array_equal(state.params, [1 - 2 / k, 2 - 4 / k])
    assert float(metrics["loss"]) == 10 / 2**17 / k
