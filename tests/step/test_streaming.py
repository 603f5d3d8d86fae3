"""Streamed windows equal whole ones, short windows are applied, and lengths follow schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.optim import adamw

ROWS, K = 3, 4


def loss_fn(params, batch, rng, seen):
    x = batch["x"]
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.8, x.shape).astype(x.dtype)
    error = (jnp.tanh(x @ params["w"]) - batch["y"]) * batch["mask"]
    return jt.Loss((error**2).sum(), batch["mask"].sum()), {"largest": jnp.abs(error).max()}, seen + 1


@functools.cache
def make_step(precision="fp32", accumulate=K):
    scaler = jt.dynamic_loss_scale(init_scale=1024.0, growth_interval=2) if precision == "fp16" else None
    return jt.train_step(
        loss_fn, adamw(0.1), precision=precision, accumulate=accumulate, clip_norm=0.5, loss_scale=scaler
    )


def init_state(step, streaming):
    return step.init({"w": np.linspace(-1, 1, 5)}, model_state=jnp.zeros([], np.int32), seed=3, streaming=streaming)


def batch(seed, micro_batches=K):
    rng = np.random.default_rng(seed)
    rows = ROWS * micro_batches
    return {
        "x": rng.standard_normal((rows, 5)).astype(np.float32),
        "y": rng.standard_normal(rows).astype(np.float32),
        "mask": rng.integers(0, 3, rows).astype(np.float32),
    }


def pieces(whole):
    n = len(whole["y"]) // ROWS
    return [{name: x[i * ROWS : (i + 1) * ROWS] for name, x in whole.items()} for i in range(n)]


def stream(step, state, whole):
    for micro_batch in pieces(whole):
        state, metrics = step.micro(state, micro_batch)
    return state, metrics


def numbers(state):
    state = state._replace(rng=jax.random.key_data(state.rng), window=None)
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def assert_same_bits(a, b):
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("accumulate", [1, 2, K])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@settings(max_examples=8)
@given(bad=st.sets(st.tuples(st.integers(0, 4), st.integers(0, ROWS * K - 1)), max_size=3))
def test_streaming_equals_the_whole_window_to_the_bit(accumulate, precision, bad):
    step = make_step(precision, accumulate)
    whole, streamed = init_state(step, False), init_state(step, True)
    for window in range(5):
        data = batch(window, accumulate)
        for w, row in bad:
            if w == window and row < len(data["y"]) and precision == "fp16":
                data["y"][row], data["mask"][row] = np.inf, 1
        whole, metrics = step(whole, data)
        streamed, micro_metrics = stream(step, streamed, data)
        assert bool(micro_metrics["updated"])
        for name in ("loss", "weight", "grad_norm", "loss_scale", "skipped", "applied"):
            np.testing.assert_array_equal(metrics[name], micro_metrics[name], err_msg=name)
        assert_same_bits(whole, streamed)
        assert int(streamed.window.sums.mini_step) == 0


def test_a_window_updates_once_and_only_when_it_is_full():
    step = jt.train_step(loss_fn, adamw(0.1), accumulate=K)
    state = init_state(step, True)
    before = np.asarray(state.params["w"]).copy()
    for i, micro_batch in enumerate(pieces(batch(0, 2 * K)), start=1):
        state, metrics = step.micro(state, micro_batch)
        assert bool(metrics["updated"]) == (i % K == 0)
        assert int(metrics["applied"]) == int(state.step) == i // K
        assert int(state.opt_state[0].count) == i // K
        assert (np.asarray(state.params["w"]) != before).any() == (i >= K)
        assert int(state.micro_step) == int(state.model_state) == i
    assert step._micro._cache_size() == 1


@pytest.mark.parametrize("n", range(1, K))
def test_a_short_last_window_is_applied_with_its_own_weight(n):
    data = batch(7, n)
    exact = make_step("fp32", n)
    expected, whole = exact(init_state(exact, False), data)
    state, _ = stream(make_step(), init_state(make_step(), True), data)
    assert int(state.step) == 0
    state, metrics = make_step().flush(state)
    assert bool(metrics["updated"])
    assert float(metrics["weight"]) == float(whole["weight"])
    np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], whole["grad_norm"], rtol=1e-6)
    # The next window starts clean.
    after, _ = stream(make_step(), state, batch(8))
    assert int(after.step) == 2


def test_flushing_an_empty_window_changes_nothing():
    state = init_state(make_step(), True)
    before = numbers(state)
    state, metrics = make_step().flush(state)
    assert not bool(metrics["updated"])
    for x, y in zip(before, numbers(state), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_run_saved_within_a_window_continues_bit_identically():
    uninterrupted = init_state(make_step(), True)
    for micro_batch in pieces(batch(1, 2 * K)):
        uninterrupted, _ = make_step().micro(uninterrupted, micro_batch)
    state = init_state(make_step(), True)
    for i, micro_batch in enumerate(pieces(batch(1, 2 * K))):
        state, _ = make_step().micro(state, micro_batch)
        if i == K + 1:
            saved = jax.tree.map(np.array, state._replace(rng=jax.random.key_data(state.rng)))
            state = jax.tree.map(jnp.asarray, saved)._replace(rng=jax.random.wrap_key_data(saved.rng))
    assert_same_bits(uninterrupted, state)


def schedule(update):
    """Return one micro-batch for the first update, then two, then three, then four."""
    return jnp.minimum(update + 1, K)


def test_a_schedule_of_lengths_counts_applied_updates_and_compiles_once():
    scaler = jt.dynamic_loss_scale(init_scale=1024.0)
    step = jt.train_step(loss_fn, adamw(0.1), precision="fp16", accumulate=schedule, loss_scale=scaler)
    state = init_state(step, True)
    micro_batches = pieces(batch(0, 20))
    # The fourth micro-batch is in the third window, of length three: it is skipped, and the next has length three too.
    micro_batches[3]["y"][0], micro_batches[3]["mask"][0] = np.inf, 1
    updated, skipped = [], []
    for i, micro_batch in enumerate(micro_batches):
        state, metrics = step.micro(state, micro_batch)
        updated += [i] if metrics["updated"] else []
        skipped += [i] if metrics["skipped"] else []
    assert updated == [0, 2, 5, 8, 12, 16]
    assert skipped == [5]
    assert int(state.step) == 6
    assert int(metrics["applied"]) == 5
    assert step._micro._cache_size() == 1


def test_a_scheduled_window_equals_a_window_of_that_constant_length():
    step = make_step("fp32", schedule)
    state = init_state(step, True)
    reference = init_state(make_step("fp32", 1), False)
    used = 0
    for length in (1, 2, 3, 4, 4):
        data = batch(length, length)
        state, metrics = stream(step, state, data)
        assert bool(metrics["updated"])
        constant = make_step("fp32", length)
        reference, _ = constant(reference, data)
        used += length
        np.testing.assert_allclose(state.params["w"], reference.params["w"], rtol=3e-6)
    assert int(state.micro_step) == int(reference.micro_step) == used


def test_the_optimizers_state_is_not_copied_per_micro_batch():
    width = 128

    def plain(params, batch, rng):
        return jt.Loss(((batch @ params) ** 2).sum(), len(batch)), {}

    step = jt.train_step(plain, optax.adam(0.1), accumulate=K)
    state = step.init(jnp.ones((width, width)), streaming=True)
    compiled = step._micro.lower(state, np.ones((2, width), np.float32)).compile()
    bytes_of_params = 4 * width**2
    # The gradient, the update and workspace; copies of both moments and of the parameters would add 3.
    assert compiled.memory_analysis().temp_size_in_bytes <= 3.5 * bytes_of_params


def test_streaming_and_whole_batch_states_are_not_interchangeable():
    with pytest.raises(jt.UserError, match="streaming=True"):
        make_step().micro(init_state(make_step(), False), pieces(batch(0))[0])
    with pytest.raises(jt.UserError, match="streaming=True"):
        make_step().flush(init_state(make_step(), False))
    with pytest.raises(jt.UserError, match="streams micro-batches"):
        make_step()(init_state(make_step(), True), batch(0))
    with pytest.raises(jt.UserError, match="accumulate is a schedule"):
        make_step("fp32", schedule)(init_state(make_step("fp32", schedule), False), batch(0))
