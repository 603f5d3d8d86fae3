"""The metrics of an update are exact, and recompilation is reported."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.step.loss_scale import dynamic_loss_scale

K, ROWS = 4, 2
PARAMS = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32), "c": {"d": np.ones(1, np.float32)}}
LEAVES = ["a", "b", "c/d"]


def loss_fn(params, batch, rng):
    total = sum((params_leaf.sum() * batch["factors"][:, i]).sum() for i, params_leaf in enumerate(leaves(params)))
    return jt.Loss(total, weight=len(batch["factors"])), {}


def leaves(params):
    return [params["a"], params["b"], params["c"]["d"]]


def rate(count):
    return 0.1 / (1 + count)


STEP = jt.train_step(loss_fn, optim.adamw(rate), accumulate=K, loss_scale=dynamic_loss_scale(2.0**10))


@given(bad=st.sets(st.tuples(st.integers(0, K - 1), st.integers(0, 2))), value=st.sampled_from([np.inf, np.nan]))
def test_the_metrics_locate_the_first_nonfinite_micro_batch_and_leaf(bad, value):
    factors = np.ones((K, ROWS, 3), np.float32)
    for micro_batch, leaf in bad:
        factors[micro_batch, 1, leaf] = value
    batch = {"factors": factors.reshape(-1, 3)}
    state, metrics = STEP(STEP.init(PARAMS), batch)
    first = min(bad, default=(-1, -1))
    assert (int(metrics["nonfinite_micro_batch"]), int(metrics["nonfinite_leaf"])) == first
    assert bool(metrics["skipped"]) == bool(bad)
    if bad:
        assert jt.leaf_name(state.params, first[1]) == LEAVES[first[1]]
    # Streamed, the window reports the same.
    state = STEP.init(PARAMS, streaming=True)
    for i in range(K):
        state, metrics = STEP.micro(state, {"factors": factors[i]})
    assert (int(metrics["nonfinite_micro_batch"]), int(metrics["nonfinite_leaf"])) == first
    assert int(state.window.nonfinite.leaf) == -1


@pytest.mark.filterwarnings("ignore:the first loss is")
def test_nonfinite_gradients_are_located_without_scaling_and_accumulation():
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    factors = np.array([[1, np.inf, 1]], np.float32)
    _, metrics = step(step.init(PARAMS), {"factors": factors})
    assert (int(metrics["nonfinite_micro_batch"]), int(metrics["nonfinite_leaf"])) == (0, 1)
    assert not metrics["skipped"]


def test_lr_and_counts_are_those_of_this_update():
    good = np.ones((K * ROWS, 3), np.float32)
    bad = np.full_like(good, np.inf)
    state = STEP.init(PARAMS)
    reported = []
    for factors in (good, bad, good, bad, bad, good):
        before = jax.tree.map(np.array, state.params)
        state, metrics = STEP(state, {"factors": factors})
        reported.append([float(metrics["lr"]), int(metrics["applied"]), int(metrics["attempted"])])
        # Adam's first steps equal its learning rate for any gradient; weight decay adds a hundredth of it.
        change = float(np.abs(before["a"] - np.asarray(state.params["a"])).max())
        assert (change == 0) == bool(metrics["skipped"])
        if change:
            assert change == pytest.approx(reported[-1][0] * (1 + 0.01 * float(before["a"][0])), rel=1e-3)
    rates = [rate(n) for n in (0, 1, 1, 2, 2, 2)]
    assert [lr for lr, _, _ in reported] == pytest.approx(rates, rel=1e-6)
    assert [(applied, attempted) for _, applied, attempted in reported] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (2, 4),
        (2, 5),
        (3, 6),
    ]


def test_lr_is_reported_for_injected_hyperparameters_and_not_for_other_optax_optimizers():
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    batch = {"factors": np.ones((2, 3), np.float32)}
    step = jt.train_step(loss_fn, injected)
    state, metrics = step(step.init(PARAMS), batch)
    _, metrics = step(state, batch)
    assert float(metrics["lr"]) == pytest.approx(0.9)
    step = jt.train_step(loss_fn, optax.sgd(1.0))
    _, metrics = step(step.init(PARAMS), batch)
    assert "lr" not in metrics


# --- The limit on recompilation.


def factors(rows, dtype=np.float32):
    return {"factors": np.ones((rows, 3), dtype)}


def test_a_second_shape_is_an_error_that_names_the_argument():
    step = jt.train_step(loss_fn, optax.sgd(0.1), allow_recompile=0)
    state, _ = step(step.init(PARAMS), factors(4))
    state, _ = step(state, factors(4))
    message = "recompilation: batch/factors is float32[3,3], was float32[4,3]; "
    with pytest.raises(jt.UserError, match=re.escape(message)):
        step(state, factors(3))
    state, metrics = step(state, factors(4))
    assert int(metrics["applied"]) == 3


def test_allow_recompile_counts_distinct_shapes_of_arguments():
    step = jt.train_step(loss_fn, optax.sgd(0.1), allow_recompile=2)
    state = step.init(PARAMS)
    for rows in (4, 3, 4, 2, 3):
        state, _ = step(state, factors(rows))
    with pytest.raises(jt.UserError, match="allow_recompile 3"):
        step(state, factors(1))


def test_an_argument_that_is_added_or_removed_is_named():
    step = jt.train_step(loss_fn, optax.sgd(0.1), allow_recompile=0)
    state, _ = step(step.init(PARAMS), factors(2) | {"extra": np.ones(2, np.float32)})
    with pytest.raises(jt.UserError, match="batch/extra is absent, was float32"):
        step(state, factors(2))
    with pytest.raises(jt.UserError, match="batch/more is int32"):
        step(state, factors(2) | {"extra": np.ones(2, np.float32), "more": np.ones(2, np.int32)})


# --- Optimizers on low-precision parameters.


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1), optax.adamw(0.1), optax.rmsprop(0.1), optim.adamw(0.1), optax.adagrad(0.1)]
)
def test_an_optimizer_of_low_precision_parameters_stays_finite_with_zero_gradients(optimizer, dtype):
    numerics = jt.Policy(dtype, matmul_precision="default")
    step = jt.train_step(loss_fn, optimizer, precision=numerics, accumulate=2)
    state = step.init(PARAMS)
    kinds = jax.tree.map(lambda x: x.dtype, state.opt_state)
    state, _ = step(state, {"factors": np.zeros((2, 3), np.float32)})
    state, _ = step(state, {"factors": np.array([[1, 0, 0], [0, 0, 1]], np.float32)})
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == kinds
    for leaf in leaves(state.params):
        assert leaf.dtype == dtype
        assert bool(jnp.isfinite(leaf).all())
    assert not np.array_equal(state.params["a"], PARAMS["a"])


# --- Larger batches.


def test_effective_batch_has_a_size_a_text_and_scaled_learning_rates():
    batch = jt.EffectiveBatch(16, accumulate=4, devices=2)
    assert (batch.size, str(batch)) == (128, "effective batch 128 = 16 × 4 micro-batches × 2 devices")
    assert batch.linear_lr(0.1, at=32) == pytest.approx(0.4)
    assert batch.sqrt_lr(0.1, at=32) == pytest.approx(0.2)
    with pytest.raises(jt.UserError, match="at must be at least 1, got 0: "):
        batch.linear_lr(0.1, at=0)
