"""Loss scaling equals `torch.amp.GradScaler` bit for bit."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import jaxtrain as jt
from jaxtrain.step.loss_scale import (
    consecutive_skips,
    current_scale,
    dynamic_loss_scale,
    found_inf,
    load_state_dict,
    no_loss_scale,
    skipped_updates,
    state_dict,
    static_loss_scale,
)
from jaxtrain.step.nonfinite import all_finite, locate_nonfinite

TRACES, UPDATES = 8, 24
# The factors multiply at most UPDATES times, so that no scale becomes subnormal: XLA's CPU backend flushes subnormals
# to zero, PyTorch does not.
SCALES = st.floats(2.0**-40, float(np.finfo(np.float32).max), width=32)
GRADIENTS = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda g: g if abs(g) > 2.0**-60 else 0.0)
BAD = st.sampled_from([np.inf, -np.inf, np.nan])


@functools.cache
def our_trace(growth_factor, backoff_factor):
    """Return a function (scales, trackers, infs, interval) → scales and trackers after every update of all traces."""

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
    for actual, expected in zip(ours, zip(*theirs, strict=True), strict=True):
        np.testing.assert_array_equal(actual, np.stack(expected))


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
def test_scale_trace_equals_torch_for_factors_not_representable_in_float32(factors, scales, trackers, infs, interval):
    check_traces(factors, scales, trackers, infs, interval)


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_scale_trace_equals_torch_on_ten_thousand_patterns_from_any_state(interval):
    random = np.random.default_rng(interval)
    n = 2500
    scales = (2.0 ** random.uniform(-100, 127, n)).astype(np.float32)
    trackers = random.integers(0, 8, n).astype(np.int32)
    infs = random.random((n, UPDATES)) < random.choice([0.0, 0.02, 0.2, 0.7], (n, 1))
    check_traces((2.0, 0.5), scales, trackers, infs, interval)


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


def test_the_scale_does_not_grow_to_infinity():
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
def test_unscaling_and_found_inf_equal_torch(scale, w, b, injected):
    grads = {"w": w.copy(), "b": b.copy()}
    for leaf, i, bad in injected:
        grads[leaf].flat[i] = bad
    theirs = {name: torch.tensor(g) for name, g in grads.items()}
    found = torch.zeros(())
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_(list(theirs.values()), found, inverse)

    ours, our_found, finite_after = unscale(np.float32(scale), grads)
    for name, g in theirs.items():
        np.testing.assert_array_equal(ours[name], g.numpy())
    assert bool(our_found) == bool(found) == bool(injected)
    assert bool(finite_after) != bool(injected)


def test_an_infinity_created_by_unscaling_is_not_an_overflow_as_in_torch():
    grads = {"w": np.array([1e30, 1.0], np.float32)}
    found = torch.zeros(())
    theirs = torch.tensor(grads["w"])
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], found, torch.tensor(2.0**40))
    ours, our_found, _ = unscale(np.float32(2.0**-40), grads)
    np.testing.assert_array_equal(ours["w"], theirs.numpy())
    assert np.isinf(ours["w"][0])
    assert bool(our_found) == bool(found) is False


def test_unscaled_gradients_stay_float32():
    grads, found, _ = unscale(np.float32(3.0), {"w": jnp.ones(2)})
    assert grads["w"].dtype == np.float32
    assert found.dtype == bool


def test_an_empty_tree_is_all_finite():
    assert all_finite({})


def test_no_loss_scale_returns_the_gradients_and_an_empty_state():
    scaler = no_loss_scale()
    grads = {"w": jnp.array([jnp.inf, -0.0])}
    state = scaler.init(grads)
    unscaled, after = scaler.update(grads, state)
    assert unscaled["w"] is grads["w"]
    assert jax.tree.leaves(after) == []
    # Python constants, so that no operation of the step depends on them.
    assert current_scale(after) == 1.0
    assert isinstance(current_scale(after), float)
    assert found_inf(after) is False


# --- Bounded, static and disabled scales.

PATTERN = st.lists(st.booleans(), min_size=1, max_size=UPDATES).map(lambda infs: infs + [False] * (UPDATES - len(infs)))


@functools.cache
def scaler_states(make):
    """Return a function (settings of a scaler, infs) → its states after every update, compiled once for each `make`."""

    def states(settings, infs):
        scaler = make(*settings)

        def update(state, inf):
            _, state = scaler.update(jnp.where(inf, jnp.inf, jnp.ones(2)), state)
            return state, state

        return jax.lax.scan(update, scaler.init(None), infs)[1]

    return jax.jit(states)


def bounded(init_scale):
    return dynamic_loss_scale(init_scale, 3.0, 0.3, 2, min_scale=0.7, max_scale=100.1)


def unbounded(init_scale):
    return dynamic_loss_scale(init_scale, 3.0, 0.3, 2)


@given(st.floats(0.75, 100, width=32), PATTERN)
def test_a_bounded_scale_equals_pytorchs_clipped_to_its_bounds(scale, infs):
    scales = scaler_states(bounded)((scale,), np.array(infs)).scale
    low, high = np.float32(0.7), np.float32(100.1)
    before = np.float32(scale)
    tracker = 0
    for inf, after in zip(infs, np.array(scales), strict=True):
        (unbounded_scale,), (tracker,) = torch_trace(before, np.int32(tracker), [inf], 2, 3.0, 0.3)
        assert after == np.clip(unbounded_scale, low, high)
        before = after


@given(st.floats(2.0**-10, 2.0**10, width=32), PATTERN)
def test_a_static_scale_is_constant_and_still_detects_and_counts_overflows(scale, infs):
    states = scaler_states(static_loss_scale)((scale,), np.array(infs))
    np.testing.assert_array_equal(states.scale, np.full(UPDATES, scale, np.float32))
    np.testing.assert_array_equal(states.found_inf, infs)
    np.testing.assert_array_equal(states.skipped, np.cumsum(infs))


@given(PATTERN)
def test_consecutive_counts_the_skips_since_the_last_clean_update(infs):
    states = scaler_states(unbounded)((8.0,), np.array(infs))
    expected = [i + 1 - max([j + 1 for j in range(i + 1) if not infs[j]], default=0) for i in range(UPDATES)]
    np.testing.assert_array_equal(states.consecutive, expected)
    assert states.consecutive.dtype == np.int32


def test_min_scale_prevents_a_scale_of_zero():
    infs = np.ones(400, bool)
    assert scaler_states(unbounded)((1.0,), infs).scale[-1] == 0
    assert scaler_states(bounded)((1.0,), infs).scale[-1] == np.float32(0.7)


def test_growth_beyond_float32_stops_at_max_scale():
    scaler = dynamic_loss_scale(2.0**127, growth_interval=1, max_scale=3e38)
    assert scaler.update(jnp.ones(1), scaler.init(None))[1].scale == np.float32(3e38)


def test_a_training_step_with_a_static_scale_skips_overflows():
    step = jt.train_step(
        lambda params, batch, rng: (jt.Loss((batch @ params).sum(), len(batch)), {}),
        optax.sgd(0.5),
        loss_scale=static_loss_scale(8.0),
    )
    state, metrics = step(step.init(jnp.ones(1)), jnp.full((2, 1), jnp.inf))
    assert bool(metrics["skipped"])
    assert float(state.params[0]) == 1
    state, metrics = step(state, jnp.ones((2, 1)))
    assert float(state.params[0]) == 0.5
    assert float(metrics["loss_scale"]) == 8


@given(arrays(np.float32, 5, elements=st.floats(width=32)))
def test_a_disabled_scaler_is_the_identity(grads):
    scaler = dynamic_loss_scale(-1, 0, 7, 0, enabled=False)
    state = scaler.init(grads)
    assert scaler.update(grads, state) == (grads, state)
    assert jax.tree.leaves(state) == []
    assert current_scale(state) == 1.0
    assert found_inf(state) is False
    assert skipped_updates(state) == consecutive_skips(state) == 0
    assert state_dict(scaler, state) == {}


def test_a_scaler_works_in_an_optax_chain():
    chain = optax.chain(dynamic_loss_scale(4.0, min_scale=1.0), optax.sgd(1.0))
    updates, _ = chain.update(jnp.full(1, 8.0), chain.init(jnp.ones(1)))
    assert float(updates[0]) == -2


# --- State dicts of PyTorch.


class TorchScaler:
    """A GradScaler with one parameter, whose gradient is 1 or inf."""

    def __init__(self, **settings):
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.param = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.param], lr=0.0)

    def update(self, inf):
        self.scaler.scale(self.param.sum())
        self.param.grad = torch.full((1,), np.inf if inf else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours_after(scaler, infs):
    state = scaler.init(None)
    for inf in infs:
        _, state = scaler.update(jnp.full(1, np.inf if inf else 1), state)
    return state_dict(scaler, state)


@settings(max_examples=25)
@given(
    st.sampled_from([(2.0, 0.5), (1.7, 0.3)]),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=6),
    st.lists(st.booleans(), max_size=6),
)
def test_both_frameworks_continue_equally_from_exchanged_state_dicts(factors, interval, before, after):
    options = dict(zip(("growth_factor", "backoff_factor"), factors, strict=True), growth_interval=interval)
    first = TorchScaler(init_scale=1000.0, **options)
    for inf in before:
        first.update(inf)
    saved = first.scaler.state_dict()

    scaler = load_state_dict(saved)
    ours = ours_after(scaler, [])
    assert ours == saved
    assert list(map(type, ours.values())) == [float, float, float, int, int]

    second = TorchScaler()
    second.scaler.load_state_dict(ours)
    for inf in after:
        first.update(inf)
        second.update(inf)
    assert ours_after(scaler, after) == first.scaler.state_dict() == second.scaler.state_dict()


def test_the_state_dict_of_a_static_scale_is_static_in_both_frameworks():
    saved = {**ours_after(static_loss_scale(48.0), [True, False]), "_growth_tracker": 1999}
    theirs = TorchScaler(growth_interval=1)
    theirs.scaler.load_state_dict({**saved, "growth_interval": 1})
    for inf in (True, False, False):
        theirs.update(inf)
    assert theirs.scaler.get_scale() == 48
    assert ours_after(load_state_dict({**saved, "growth_interval": 1}), [True, False, False])["scale"] == 48


SAVED = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 0}
INVALID = {
    "growth_factor must be finite and > 1, got 1.0": lambda: dynamic_loss_scale(growth_factor=1.0),
    "growth_factor must be finite and > 1, got inf": lambda: dynamic_loss_scale(growth_factor=np.inf),
    "growth_factor must be finite and > 1, got nan": lambda: dynamic_loss_scale(growth_factor=np.nan),
    "backoff_factor must be in (0, 1), got 1.0": lambda: dynamic_loss_scale(backoff_factor=1.0),
    "backoff_factor must be in (0, 1), got 0": lambda: dynamic_loss_scale(backoff_factor=0),
    "growth_interval must be an integer in [1, 2**31), got 0": lambda: dynamic_loss_scale(growth_interval=0),
    f"growth_interval must be an integer in [1, 2**31), got {2**31}": lambda: dynamic_loss_scale(growth_interval=2**31),
    "growth_interval must be an integer in [1, 2**31), got 2.5": lambda: dynamic_loss_scale(growth_interval=2.5),
    "init_scale must be a positive float32, got 0.0": lambda: dynamic_loss_scale(0.0),
    "init_scale must be a positive float32, got -2": lambda: dynamic_loss_scale(-2),
    "init_scale must be a positive float32, got nan": lambda: dynamic_loss_scale(np.nan),
    "init_scale must be a positive float32, got 1e+39": lambda: dynamic_loss_scale(1e39),
    "min_scale must be a positive float32, got 0": lambda: dynamic_loss_scale(min_scale=0),
    "max_scale must be a positive float32, got inf": lambda: dynamic_loss_scale(max_scale=np.inf),
    "min_scale 4.0 must not exceed max_scale 2.0": lambda: dynamic_loss_scale(3.0, min_scale=4.0, max_scale=2.0),
    "init_scale 65536.0 must be in [min_scale, max_scale]: [None, 1024.0]": lambda: dynamic_loss_scale(
        max_scale=1024.0
    ),
    "init_scale 2.0 must be in [min_scale, max_scale]: [4.0, None]": lambda: dynamic_loss_scale(2.0, min_scale=4.0),
    "scale must be a positive float32, got inf": lambda: static_loss_scale(np.inf),
    "is empty": lambda: load_state_dict({}),
    "lacks growth_interval, _growth_tracker": lambda: load_state_dict(dict(list(SAVED.items())[:3])),
    "got 0.0: use 65536": lambda: load_state_dict({**SAVED, "scale": 0.0}),
    "_growth_tracker must be an integer in [0, 2**31), got -1": lambda: load_state_dict(
        {**SAVED, "_growth_tracker": -1}
    ),
    f"_growth_tracker must be an integer in [0, 2**31), got {2**31}": lambda: load_state_dict(
        {**SAVED, "_growth_tracker": 2**31}
    ),
    "growth_interval must be an integer in [1, 2**31), got -5": lambda: load_state_dict(
        {**SAVED, "growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": -5}
    ),
    "must be in [min_scale, max_scale]: [16": lambda: load_state_dict(SAVED, min_scale=16),
    "state must be that of a loss scaler, got": lambda: state_dict(optax.sgd(1.0), optax.sgd(1.0).init(jnp.ones(1))),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_value_raises_one_line_with_the_value_and_the_remedy(message):
    with pytest.raises(jt.UserError, match=re.escape(message)) as error:
        INVALID[message]()
    assert ": " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("exponent", [-100, -20, 0, 16, 64, 65, 100, 126, 127])
@pytest.mark.parametrize("mantissa", [1.0, 1.7])
def test_unscaling_equals_grad_scaler_at_every_normal_scale(exponent, mantissa):
    scale = np.float32(mantissa * 2.0**exponent)
    true = np.float32([1e-3, 1.0, -3.7])
    scaled = np.clip(true.astype(np.float64) * scale, -3e38, 3e38).astype(np.float32)
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.from_numpy(scaled.copy())
    theirs = torch.amp.GradScaler("cpu", init_scale=float(scale))
    theirs.scale(torch.zeros(1))
    theirs.unscale_(torch.optim.SGD([parameter], lr=1.0))
    ours = jt.dynamic_loss_scale(init_scale=float(scale))
    unscaled, _ = jax.jit(ours.update)(jnp.asarray(scaled), ours.init(None))
    if 1 / scale >= np.finfo(np.float32).tiny:  # below, PyTorch's reciprocal is subnormal and less precise
        np.testing.assert_array_max_ulp(np.asarray(unscaled), parameter.grad.numpy(), maxulp=1)
    truth = (scaled.astype(np.float64) / scale).astype(np.float32)
    np.testing.assert_array_max_ulp(np.asarray(unscaled), truth, maxulp=2)


@pytest.mark.parametrize("big", [1e30, 3e38])
def test_a_finite_gradient_whose_norm_overflows_is_finite(big):
    grads = {"a": jnp.full(4, big, jnp.float32), "b": jnp.ones(3)}
    assert not np.isfinite(optax.tree.norm(grads))
    assert all_finite(grads)
    assert [int(x) for x in locate_nonfinite(grads, 2)] == [-1, -1]
    for bad in (np.inf, -np.inf, np.nan):
        worse = {**grads, "b": grads["b"].at[1].set(bad)}
        assert not all_finite(worse)
        assert [int(x) for x in locate_nonfinite(worse, 2)] == [2, 1]
