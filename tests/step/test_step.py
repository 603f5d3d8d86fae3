"""The training step with any library's models, against PyTorch's loop, and with skipped updates."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.models import functional
from tests.step.regression import BATCH32, X, Y, assert_same_bits, batch_with, scaled_step, squared_error


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, param_dtype=x.dtype)(nn.tanh(nn.Dense(8, param_dtype=x.dtype)(x)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def from_nnx_state():
    graphdef, params = nnx.split(NnxMLP(nnx.Rngs(0)))
    return params, lambda params, batch, rng: squared_error(nnx.merge(graphdef, params)(batch["x"]), batch)


def from_nnx_functional():
    apply, params = functional(NnxMLP(nnx.Rngs(0)))
    return params, lambda params, batch, rng: squared_error(apply(params, batch["x"]), batch)


def from_linen():
    model = LinenMLP()
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    return params, lambda params, batch, rng: squared_error(model.apply(params, batch["x"]), batch)


def from_equinox():
    params, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda params, batch, rng: squared_error(jax.vmap(eqx.combine(params, static))(batch["x"]), batch)


def from_bare_arrays():
    params = [jnp.ones((4, 8)) / 4, jnp.ones((8, 2)) / 8]
    return params, lambda params, batch, rng: squared_error(jnp.tanh(batch["x"] @ params[0]) @ params[1], batch)


@pytest.mark.parametrize("library", [from_nnx_state, from_nnx_functional, from_linen, from_equinox, from_bare_arrays])
def test_training_with_any_library_equals_a_hand_written_optax_loop(library):
    with jax.enable_x64(True):
        params, loss_fn = library()
        params = jax.tree.map(lambda x: x.astype(np.float64), params)
        batch = {"x": X, "y": Y}
        optimizer = optax.adamw(0.03)

        @jax.jit
        def by_hand(params, opt_state):
            def mean_loss(params):
                loss, _ = loss_fn(params, batch, None)
                return loss.total / loss.weight

            loss, grads = jax.value_and_grad(mean_loss)(params)
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

        step = jt.train_step(loss_fn, optimizer, precision="fp64")
        state = step.init(params)
        expected, opt_state = params, optimizer.init(params)
        losses = []
        for _ in range(5):
            state, metrics = step(state, batch)
            expected, opt_state, loss, norm = by_hand(expected, opt_state)
            losses.append(float(metrics["loss"]))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-13)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-13)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), state.params, expected)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), state.opt_state, opt_state)
        assert losses == sorted(losses, reverse=True)


def test_adamw_with_clipping_and_uneven_accumulation_equals_a_pytorch_loop():
    k, rows, steps, max_norm = 4, 16, 6, 0.5
    random = np.random.default_rng(1)
    w1, w2 = random.normal(size=(5, 8)), random.normal(size=(8, 3))
    x, labels = random.normal(size=(steps, rows, 5)), random.integers(0, 3, size=(steps, rows))
    # Uneven weights; one micro-batch of every window has weight 0.
    mask = (random.random((steps, rows)) < 0.6).astype(np.float64)
    mask[np.arange(steps)[:, None], (np.arange(steps) % k * 4)[:, None] + np.arange(4)] = 0

    def loss_fn(params, batch, rng):
        logits = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jt.Loss((losses * batch["mask"]).sum(), batch["mask"].sum()), {}

    torch_params = [torch.nn.Parameter(torch.tensor(w)) for w in (w1, w2)]
    optimizer = torch.optim.AdamW(torch_params, lr=0.02, weight_decay=0.1)
    with jax.enable_x64(True):
        adamw = optax.adamw(0.02, weight_decay=0.1)
        step = jt.train_step(loss_fn, adamw, precision="fp64", accumulate=k, clip_norm=max_norm)
        state = step.init({"w1": w1, "w2": w2})
        for i in range(steps):
            state, metrics = step(state, {"x": x[i], "label": labels[i], "mask": mask[i]})

            optimizer.zero_grad()
            tensors = [torch.tensor(a[i]).chunk(k) for a in (x, labels, mask)]
            total = 0.0
            for xs, ys, ms in zip(*tensors, strict=True):
                logits = torch.tanh(xs @ torch_params[0]) @ torch_params[1]
                losses = torch.nn.functional.cross_entropy(logits, ys, reduction="none")
                loss = (losses * ms).sum() / mask[i].sum()
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(torch_params, max_norm)
            optimizer.step()

            assert norm > max_norm
            np.testing.assert_allclose(metrics["loss"], total, rtol=1e-10)
            np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-10)
            adam = state.opt_state[0]
            for name, p in zip(("w1", "w2"), torch_params, strict=True):
                moments = optimizer.state[p]
                np.testing.assert_allclose(state.params[name], p.detach(), rtol=1e-10)
                np.testing.assert_allclose(adam.mu[name], moments["exp_avg"], rtol=1e-10, atol=1e-18)
                np.testing.assert_allclose(adam.nu[name], moments["exp_avg_sq"], rtol=1e-10, atol=1e-18)


@functools.cache
def powers_of_two_step(k):
    def loss_fn(params, batch, rng):
        return jt.Loss((batch @ params).sum(), len(batch)), {}

    scaler = jt.dynamic_loss_scale(init_scale=8.0, growth_interval=2)
    return jt.train_step(loss_fn, optax.sgd(0.5), accumulate=k, loss_scale=scaler)


@pytest.mark.parametrize("k", [1, 2, 4])
@settings(max_examples=20)
@given(
    data=st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 23)),
    kind=st.sampled_from([np.inf, -np.inf, np.nan]),
)
def test_windows_with_overflows_equal_a_pytorch_loop_with_grad_scaler_to_the_bit(k, data, bad, kind):
    # Powers of two and integers: neither side rounds, whatever the order of its sums.
    batches = np.array(data, np.float32)
    batches.flat[[i for i in bad if i < batches.size]] = kind
    params = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([params], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    state = powers_of_two_step(k).init(jnp.zeros(1))
    for batch in batches:
        scale_before = scaler.get_scale()
        state, metrics = powers_of_two_step(k)(state, batch[:, None])

        optimizer.zero_grad()
        for micro_batch in torch.tensor(batch[:, None]).chunk(k):
            scaler.scale((micro_batch @ params).mean() / k).backward()
        scaler.step(optimizer)
        scaler.update()

        np.testing.assert_array_equal(state.params, params.detach().numpy())
        assert float(state.loss_scale.scale) == scaler.get_scale()
        assert int(state.loss_scale.growth_tracker) == scaler._get_growth_tracker()
        assert float(metrics["loss_scale"]) == scale_before
        assert bool(metrics["skipped"]) != np.isfinite(batch).all()
    assert int(metrics["applied"]) == np.isfinite(batches).all(axis=1).sum()


def scaled_state():
    random = np.random.default_rng(2)
    v = random.normal(size=(8, 2)).astype(np.float32)
    return scaled_step().init({"w": random.normal(size=(4, 8)), "v": v, "b": np.array([-0.0, 0.0], np.float32)})


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("row", [0, 5, 11])
def test_a_skipped_update_changes_only_the_loss_scale_which_is_halved(bad, row):
    state, _ = scaled_step()(scaled_state(), BATCH32)
    # Zeros of either sign, whose signs an update of zero would not preserve.
    state = state._replace(params={**state.params, "b": jnp.array([-0.0, 0.0])})
    adam, *rest = state.opt_state
    state = state._replace(opt_state=(adam._replace(mu={**adam.mu, "b": jnp.array([-0.0, 0.0])}), *rest))
    before = jax.device_get(state)
    state, metrics = scaled_step()(state, batch_with(bad, row))

    assert_same_bits(state.params, before.params)
    assert_same_bits(state.opt_state, before.opt_state)
    assert bool(metrics["skipped"])
    assert int(metrics["applied"]) == 1
    assert float(metrics["loss_scale"]) == 1024
    assert float(state.loss_scale.scale) == 512
    assert int(state.loss_scale.growth_tracker) == 0

    state, metrics = scaled_step()(state, BATCH32)
    assert not bool(metrics["skipped"])
    assert int(metrics["applied"]) == 2
    assert int(state.opt_state[0].count) == 2


@settings(max_examples=15)
@given(st.integers(0, 11), st.sampled_from([np.inf, -np.inf, np.nan]), st.integers(1, 2))
def test_a_run_with_skipped_windows_equals_a_run_without_them(row, bad, n_bad):
    clean, skipping = scaled_state(), scaled_state()
    for i in range(3):
        clean, _ = scaled_step()(clean, BATCH32)
        if i == 1:
            for _ in range(n_bad):
                skipping, metrics = scaled_step()(skipping, batch_with(bad, row))
                assert bool(metrics["skipped"])
        skipping, metrics = scaled_step()(skipping, BATCH32)
    # The scale was halved; scaling and unscaling by powers of two does not round.
    assert_same_bits(skipping.params, clean.params)
    assert_same_bits(skipping.opt_state, clean.opt_state)
    assert int(metrics["applied"]) == 3


@pytest.mark.filterwarnings("ignore:the first loss is")
def test_without_loss_scaling_nothing_is_skipped():
    step = jt.train_step(lambda params, batch, rng: (jt.Loss((params * batch).sum(), 1), {}), optax.sgd(1.0))
    state, metrics = step(step.init(jnp.zeros(2)), np.array([np.nan, 1], np.float32))
    np.testing.assert_array_equal(state.params, [np.nan, -1])
    assert not bool(metrics["skipped"])
    assert int(metrics["applied"]) == 1
