"""The laws of loss scaling: those of `torch.amp.GradScaler`, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxtrain.loss_scale import all_finite, current_scale, dynamic_loss_scale, found_inf, no_loss_scale

TRACES, UPDATES = 8, 24
# The factors multiply at most UPDATES times, so that no scale leaves float32's normal range downwards: there XLA's CPU
# backend flushes to zero what PyTorch keeps.
SCALES = st.floats(2.0**-40, float(np.finfo(np.float32).max), width=32)
GRADIENTS = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda g: g if abs(g) > 2.0**-60 else 0.0)
BAD = st.sampled_from([np.inf, -np.inf, np.nan])


@functools.cache
def our_trace(growth_factor, backoff_factor):
    """(scales, trackers, infs, interval) → scales and trackers after every update, all traces at once."""

    def trace(scale, tracker, infs, interval):
        scaler = dynamic_loss_scale(1.0, growth_factor, backoff_factor, interval)
        state = scaler.init(None)._replace(scale=scale, growth_tracker=tracker)

        def update(state, inf):
            _, state = scaler.update({"w": jnp.where(inf, jnp.inf, jnp.ones(2))}, state)
            return state, (state.scale, state.growth_tracker)

        return jax.lax.scan(update, state, infs)[1]

    return jax.jit(jax.vmap(trace, in_axes=(0, 0, 0, None)))


def torch_trace(scale, tracker, infs, interval, growth_factor, backoff_factor):
    scale, tracker = torch.tensor(scale), torch.tensor(tracker)
    scales, trackers = [], []
    for inf in infs:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(inf)), growth_factor, backoff_factor, interval)
        scales.append(scale.item())
        trackers.append(tracker.item())
    return np.array(scales, np.float32), np.array(trackers, np.int32)


def check_traces(factors, scales, trackers, infs, interval):
    ours = our_trace(*factors)(scales, trackers, infs, np.int32(interval))
    theirs = [torch_trace(*trace, interval, *factors) for trace in zip(scales, trackers, infs, strict=True)]
    for mine, torchs in zip(ours, zip(*theirs, strict=True), strict=True):
        np.testing.assert_array_equal(mine, np.stack(torchs))


TRACE = {
    "scales": arrays(np.float32, TRACES, elements=SCALES),
    "trackers": arrays(np.int32, TRACES, elements=st.integers(0, 8)),
    "infs": arrays(bool, (TRACES, UPDATES)),
    "interval": st.integers(1, 6),
}


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.5, 0.25), (4.0, 0.75)])
@settings(max_examples=100)
@given(**TRACE)
def test_scale_trace_equals_torch(factors, scales, trackers, infs, interval):
    check_traces(factors, scales, trackers, infs, interval)


@pytest.mark.parametrize("factors", [(1.1, 0.9), (1.7, 0.3)])
@settings(max_examples=30)
@given(**TRACE)
def test_scale_trace_equals_torch_for_factors_that_float32_cannot_hold(factors, scales, trackers, infs, interval):
    check_traces(factors, scales, trackers, infs, interval)


def test_scale_trace_equals_torch_over_ten_thousand_updates_at_the_default_interval():
    random = np.random.default_rng(0)
    infs = random.random(10_000) < 1 / 3000
    assert infs.sum() >= 2

    scaler = dynamic_loss_scale()

    def update(state, inf):
        _, state = scaler.update(jnp.where(inf, jnp.nan, jnp.float32(0)), state)
        return state, (state.scale, state.growth_tracker)

    final, (scales, trackers) = jax.jit(lambda infs: jax.lax.scan(update, scaler.init(None), infs))(infs)
    expected = torch_trace(np.float32(65536), np.int32(0), infs, 2000, 2.0, 0.5)
    np.testing.assert_array_equal(scales, expected[0])
    np.testing.assert_array_equal(trackers, expected[1])
    assert len(np.unique(scales)) > 2
    assert final.skipped == infs.sum()


def test_growth_is_refused_where_it_would_not_be_finite():
    scales, trackers = our_trace(2.0, 0.5)(
        np.full(1, 2.0**127, np.float32), np.zeros(1, np.int32), np.zeros((1, UPDATES), bool), np.int32(2)
    )
    np.testing.assert_array_equal(scales[0], np.full(UPDATES, 2.0**127, np.float32))
    np.testing.assert_array_equal(trackers[0], np.tile([1, 0], UPDATES // 2))


@jax.jit
def unscale(scale, grads):
    scaler = dynamic_loss_scale()
    grads, state = scaler.update(grads, scaler.init(None)._replace(scale=scale))
    return grads, state.found_inf, all_finite(grads)


@settings(max_examples=60)
@given(
    st.floats(2.0**-40, 2.0**40, width=32),
    arrays(np.float32, 16, elements=GRADIENTS),
    arrays(np.float32, (2, 3), elements=GRADIENTS),
    st.lists(st.tuples(st.sampled_from("wb"), st.integers(0, 5), BAD), max_size=2),
)
def test_unscaling_and_found_inf_equal_torchs(scale, w, b, planted):
    grads = {"w": w.copy(), "b": b.copy()}
    for leaf, i, bad in planted:
        grads[leaf].flat[i] = bad
    theirs = {name: torch.tensor(g) for name, g in grads.items()}
    found = torch.zeros(())
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_(list(theirs.values()), found, inverse)

    ours, found_here, finite_after = unscale(np.float32(scale), grads)
    for name, g in theirs.items():
        np.testing.assert_array_equal(ours[name], g.numpy())
    assert bool(found_here) == bool(found) == bool(planted)
    assert bool(finite_after) != bool(planted)


def test_unscaling_keeps_float32_whatever_the_scale():
    grads, found, _ = unscale(np.float32(3.0), {"w": jnp.ones(2)})
    assert grads["w"].dtype == np.float32
    assert found.dtype == bool


def test_a_scaler_without_gradients_finds_nothing():
    assert all_finite({})


def test_disabled_does_nothing_at_all():
    scaler = no_loss_scale()
    grads = {"w": jnp.array([jnp.inf, -0.0])}
    state = scaler.init(grads)
    unscaled, after = scaler.update(grads, state)
    assert unscaled["w"] is grads["w"]
    assert jax.tree.leaves(after) == []
    # Python constants, so that not one operation of the step depends on them.
    assert current_scale(after) == 1.0
    assert isinstance(current_scale(after), float)
    assert found_inf(after) is False
