"""The step and the PyTorch loop it replaces have the same state after every update of random histories.

The loop is the one a PyTorch user writes: `GradScaler`, `backward` per micro-batch, `unscale_`, `clip_grad_norm_`,
`step`, `update`. Both run in float64, where rounding errors are about 1e-16 and any semantic difference is larger.
JAXTRAIN_SEQUENCES sets the number of histories.
"""

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.optim import adamw
from jaxtrain.step.loss_scale import dynamic_loss_scale

SEQUENCES = int(os.environ.get("JAXTRAIN_SEQUENCES", 1000))
TOLERANCE = 1e-10
MAX_MICROS, MAX_K = 48, 8
INIT = {"v": np.array([0.9, -0.2]), "w": np.array([0.4, -0.7])}
ROWS = np.random.default_rng(0).normal(size=(16, 2, 3))

POISONS = {None: None, "y=inf": ("y", np.inf), "y=nan": ("y", np.nan), "x=inf": ("x", np.inf)}


class Micro(NamedTuple):
    """A micro-batch of two rows: indices into ROWS, the rows' weights, and the bad value in the second row, if any."""

    rows: int
    weights: tuple[float, float]
    poison: str | None

    def batch(self):
        x, y = ROWS[self.rows, :, :2].copy(), ROWS[self.rows, :, 2].copy()
        if self.poison:
            name, value = POISONS[self.poison]
            {"x": x, "y": y}[name][1] = value
        return {"x": x, "y": y, "weight": np.array(self.weights)}


WEIGHTS = ((1.0, 1.0), (3.0, 1.0), (0.5, 0.25), (1.0, 0.0), (0.0, 0.0), (0.0, 7.0))
MICRO = st.builds(
    Micro,
    rows=st.integers(0, len(ROWS) - 1),
    weights=st.sampled_from(WEIGHTS),
    poison=st.sampled_from((None,) * 27 + tuple(POISONS)[1:]),
)
# Short histories simplify counterexamples; in long ones the scale grows.
MICROS = st.lists(MICRO, max_size=MAX_MICROS // 2) | st.lists(MICRO, min_size=MAX_MICROS // 2, max_size=MAX_MICROS)
INTERVALS = st.integers(2, 5)
# The reciprocal of 1000 is rounded to float32 on both sides.
SCALES = st.sampled_from([2.0**16, 1.0, 1000.0, 2.0**-20, 2.0**90])


def rate(applied):
    return 0.06 / (1 + applied)


def loss_sum(params, batch, tanh):
    error = params["v"][0] * tanh(batch["x"] @ params["w"] + params["v"][1]) - batch["y"]
    return (batch["weight"] * error**2).sum()


def loss_fn(params, batch, rng):
    return jt.Loss(loss_sum(params, batch, jnp.tanh), batch["weight"].sum()), {}


class TorchLoop:
    """The training loop of a PyTorch user."""

    def __init__(self, optimizer, clip_norm, init_scale, interval):
        self.params = {name: torch.tensor(p, requires_grad=True) for name, p in INIT.items()}
        leaves = list(self.params.values())
        if optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(leaves, weight_decay=0.1)
            self.moment_names = ("exp_avg", "exp_avg_sq")
        else:
            self.optimizer = torch.optim.SGD(leaves, momentum=0.9)
            self.moment_names = ("momentum_buffer",)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval)
        self.clip_norm = clip_norm
        self.applied = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_):
        self.applied += 1

    def update(self, micro_batches):
        """Train on one window; return its gradient norm before clipping."""
        weight = sum(sum(m.weights) for m in micro_batches) or 1.0
        for m in micro_batches:
            batch = {name: torch.from_numpy(value) for name, value in m.batch().items()}
            self.scaler.scale(loss_sum(self.params, batch, torch.tanh) / weight).backward()
        self.scaler.unscale_(self.optimizer)
        bound = np.inf if self.clip_norm is None else self.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), bound).item()
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.applied)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def numbers(self):
        """Return parameters and moments, each as a vector."""
        params = [p.detach() for p in self.params.values()]
        states = [self.optimizer.state[p] for p in self.params.values()]
        moments = [
            [s.get(name, torch.zeros_like(p)) for s, p in zip(states, params, strict=True)]
            for name in self.moment_names
        ]
        return [torch.cat(leaves).numpy() for leaves in (params, *moments)]


def our_step(optimizer, clip_norm, interval, k):
    tx = adamw(rate, weight_decay=0.1) if optimizer == "adamw" else optax.sgd(rate, momentum=0.9)
    loss_scale = dynamic_loss_scale(growth_interval=interval)
    return jt.train_step(loss_fn, tx, precision="fp64", accumulate=k, clip_norm=clip_norm, loss_scale=loss_scale)


def our_numbers(state):
    inner = state.opt_state[0]
    moments = (inner.mu, inner.nu) if hasattr(inner, "mu") else (inner.trace,)
    return [np.concatenate([tree["v"], tree["w"]]) for tree in (state.params, *moments)]


@functools.cache
def compiled(optimizer, clip_norm, interval):
    """Return micro and flush with the schedule of k as an argument, so that all schedules share one program."""

    def step(lengths):
        return our_step(optimizer, clip_norm, interval, lambda applied: lengths[applied])

    return (
        jax.jit(lambda state, micro_batch, lengths: step(lengths).micro(state, micro_batch)),
        jax.jit(lambda state, lengths: step(lengths).flush(state)),
    )


@functools.cache
def initial(optimizer, streaming):
    """Return a new state, which is the same for every growth interval and clip_norm."""
    return jax.device_get(our_step(optimizer, None, 2, 1).init(INIT, streaming=streaming))


def start(optimizer, init_scale, streaming):
    state = initial(optimizer, streaming)
    state = state._replace(loss_scale=state.loss_scale._replace(scale=np.float32(init_scale)))
    return jax.tree.map(jnp.array, state)


def check_update(state, metrics, loop, window):
    """Train the loop on the same window, and compare the states after it."""
    used, before = loop.scaler.get_scale(), loop.applied
    norm = loop.update(window)
    clean = loop.applied > before
    scaler = loop.scaler.state_dict()
    assert float(metrics["loss_scale"]) == used
    assert bool(metrics["skipped"]) is not clean
    assert int(metrics["applied"]) == loop.applied
    assert float(state.loss_scale.scale) == scaler["scale"]
    assert int(state.loss_scale.growth_tracker) == scaler["_growth_tracker"]
    if clean:
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=TOLERANCE)
    if hasattr(state.opt_state[0], "mu"):
        assert int(state.opt_state[0].count) == loop.applied
    for ours, theirs in zip(our_numbers(state), loop.numbers(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())
    event(f"a window of {len(window)}")
    event("applied" if clean else "skipped")
    if scaler["scale"] > used:
        event("the scale grew")


DRAWN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize(
    ("optimizer", "clip_norm", "histories"),
    [
        ("adamw", 0.5, SEQUENCES // 20),
        ("adamw", None, SEQUENCES // 10),
        ("sgd", 0.5, SEQUENCES // 10),
        *(
            pytest.param(optimizer, clip_norm, SEQUENCES // 4, marks=pytest.mark.nightly)
            for optimizer in ("adamw", "sgd")
            for clip_norm in (None, 0.5)
        ),
    ],
)
def test_every_update_of_streamed_windows_equals_that_of_a_pytorch_loop(optimizer, clip_norm, histories):
    """k follows a schedule of applied updates; a flush applies a short window and does nothing to an empty one."""

    @settings(DRAWN, max_examples=histories)
    @given(
        micros=MICROS,
        flushes=st.sets(st.integers(0, MAX_MICROS - 1), max_size=8),
        schedule=st.lists(st.integers(1, MAX_K), min_size=1, max_size=8),
        init_scale=SCALES,
        interval=INTERVALS,
    )
    def check(micros, flushes, schedule, init_scale, interval):
        lengths = np.resize(np.array(schedule, np.int32), MAX_MICROS + 1)
        micro, flush = compiled(optimizer, clip_norm, interval)
        loop = TorchLoop(optimizer, clip_norm, init_scale, interval)
        with jax.enable_x64(True):
            state, window = start(optimizer, init_scale, streaming=True), []
            for i, micro_batch in enumerate(micros):
                state, metrics = micro(state, micro_batch.batch(), lengths)
                window.append(micro_batch)
                filled = len(window) == int(lengths[loop.applied])
                assert bool(metrics["updated"]) is filled
                if filled:
                    check_update(state, metrics, loop, window)
                    window = []
                if i in flushes:
                    state, metrics = flush(state, lengths)
                    assert bool(metrics["updated"]) is bool(window)
                    if window:
                        check_update(state, metrics, loop, window)
                        event("a short window")
                    window = []

    check()


@functools.cache
def whole(optimizer, clip_norm, interval, k):
    return our_step(optimizer, clip_norm, interval, k)


@pytest.mark.parametrize(
    ("optimizer", "clip_norm", "interval", "k"), [("adamw", 0.5, 2, 1), ("adamw", None, 3, 4), ("sgd", 0.5, 2, 3)]
)
@settings(DRAWN, max_examples=SEQUENCES // 8)
@given(data=st.data(), windows=st.integers(1, 12), init_scale=SCALES)
def test_every_update_of_whole_windows_equals_that_of_a_pytorch_loop(
    optimizer, clip_norm, interval, k, data, windows, init_scale
):
    step = whole(optimizer, clip_norm, interval, k)
    loop = TorchLoop(optimizer, clip_norm, init_scale, interval)
    with jax.enable_x64(True):
        state = start(optimizer, init_scale, streaming=False)
        for _ in range(windows):
            window = data.draw(st.lists(MICRO, min_size=k, max_size=k))
            batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *[m.batch() for m in window])
            state, metrics = step(state, batch)
            check_update(state, metrics, loop, window)
