"""The training state: donation, compilation, resuming, the key and the model's state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests.step.regression import (
    BATCH32,
    adam_with_schedule,
    assert_same_bits,
    batch_with,
    is_deleted,
    scaled_step,
    squared_error,
)


def test_the_state_is_donated_and_the_users_arrays_are_not():
    params = {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 2)), "b": jnp.zeros(2)}
    old = scaled_step().init(params)
    new, _ = scaled_step()(old, BATCH32)
    assert all(is_deleted((old.params, old.opt_state)))
    assert not any(is_deleted(new))
    assert not any(is_deleted(params))
    np.testing.assert_array_equal(params["w"], np.ones((4, 8)))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(0.1),
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
        optax.contrib.schedule_free_adamw(0.1),
        optax.contrib.prodigy(),
    ],
    ids=["momentum", "adamw", "injected", "schedule_free", "prodigy"],
)
def test_the_state_of_any_optimizer_can_be_donated_and_compiles_once(optimizer):
    step = jt.train_step(lambda params, batch, rng: squared_error(batch["x"] @ params, batch), optimizer, accumulate=2)
    state = step.init(jnp.ones((4, 2)))
    losses = []
    for _ in range(4):
        state, metrics = step(state, BATCH32)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert step.jitted._cache_size() == 1


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_step_compiles_once(precision, remat):
    traces = []

    def loss_fn(params, batch, rng):
        traces.append(1)
        x = batch["x"] * jax.random.bernoulli(rng, 0.9, (4, 4)).astype(np.float32)
        return squared_error(x @ params["w"], batch)

    step = jt.train_step(loss_fn, adam_with_schedule(), precision=precision, accumulate=3, clip_norm=1.0, remat=remat)
    state = step.init({"w": np.ones((4, 2))})
    state, _ = step(state, BATCH32)
    traced = len(traces)
    for batch in (BATCH32, batch_with(np.inf, 3), BATCH32):
        state, metrics = step(state, batch)
    assert int(metrics["applied"]) < 4 or precision == "fp32"
    assert step.jitted._cache_size() == 1
    state, _ = step(from_host(to_host(state)), jax.tree.map(jnp.asarray, BATCH32))
    step(state, BATCH32)
    assert len(traces) == traced


def to_host(state):
    return jax.tree.map(np.array, state._replace(rng=jax.random.key_data(state.rng)))


def from_host(saved):
    return jax.tree.map(jnp.asarray, saved)._replace(rng=jax.random.wrap_key_data(saved.rng))


def test_resuming_from_a_host_copy_is_bit_identical():
    def loss_fn(params, batch, rng, seen):
        x = jnp.where(jax.random.bernoulli(rng, 0.7, batch["x"].shape), batch["x"], jnp.zeros_like(batch["x"]))
        loss, _ = squared_error(jnp.tanh(x @ params["w"]) @ params["v"], batch)
        return loss, {"kept": (x != 0).astype(np.float32).mean()}, seen * 0.5 + x.mean()

    scaler = jt.dynamic_loss_scale(init_scale=2.0**20, growth_interval=2)
    step = jt.train_step(loss_fn, adam_with_schedule(), precision="fp16", accumulate=2, loss_scale=scaler)
    params = {"w": np.full((4, 8), 0.1), "v": np.full((8, 2), 0.2)}
    state = step.init(params, model_state=jnp.zeros(()), seed=7)
    states, history = [], []
    for _ in range(8):
        state, metrics = step(state, BATCH32)
        states.append(to_host(state))
        history.append(jax.device_get(metrics))
    # The history contains skips, growth and updates.
    assert {bool(m["skipped"]) for m in history} == {True, False}
    assert any(a["loss_scale"] < b["loss_scale"] for a, b in itertools.pairwise(history))
    for start in (0, 3, 6):
        state = from_host(states[start])
        for i in range(start + 1, 8):
            state, metrics = step(state, BATCH32)
            assert_same_bits(to_host(state), states[i])
            assert_same_bits(jax.device_get(metrics), history[i])


def test_a_run_is_determined_by_its_seed():
    step = jt.train_step(
        lambda params, batch, rng: (jt.Loss((params * jax.random.normal(rng, (3,))).sum() + batch.sum(), 1), {}),
        optax.sgd(1.0),
    )
    a, b, c = (step(step.init(jnp.zeros(3), seed=seed), np.zeros(1, np.float32))[0].params for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_integer_leaves_of_model_state_keep_their_dtype():
    def loss_fn(params, batch, rng, state):
        return jt.Loss((batch @ params).sum(), 1), {}, {**state, "seen": state["seen"] + 1}

    step = jt.train_step(loss_fn, optax.sgd(1.0), precision="bf16", accumulate=2)
    state = step.init(jnp.zeros(2), model_state={"seen": jnp.zeros((), np.int32), "mean": jnp.ones(2)})
    state, _ = step(state, np.ones((4, 2), np.float32))
    assert int(state.model_state["seen"]) == 2
    assert state.model_state["seen"].dtype == np.int32
    assert state.model_state["mean"].dtype == np.float32


def test_model_state_passes_through_the_micro_batches_in_order():
    def loss_fn(params, batch, rng, mean):
        mean = 0.5 * mean + 0.5 * batch.mean()
        return jt.Loss((params * batch).sum(), len(batch)), {"mean": mean}, mean

    step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate=3)
    state = step.init(jnp.zeros(()), model_state=jnp.zeros(()))
    state, metrics = step(state, np.array([2, 2, 8, 8, 16, 16], np.float32))
    # 0 → 1 → 4.5 → 10.25: every micro-batch starts from the state of the previous one.
    assert float(state.model_state) == 10.25
    assert float(metrics["mean"]) == np.float32((1 + 4.5 + 10.25) / 3)
    state, _ = step(state, np.zeros(6, np.float32))
    assert float(state.model_state) == 10.25 / 8
