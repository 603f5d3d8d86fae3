"""The training step: optimizers, PyTorch's loop, skipped updates, the state, the metrics, errors."""

import copy
import functools
import itertools

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

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 4)), RANDOM.normal(size=(12, 2))
BATCH32 = {"x": X.astype(np.float32), "y": Y.astype(np.float32)}


def assert_same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), (a, b)


def squared_error(out, batch):
    return jt.Loss(((out - batch["y"]) ** 2).sum(), weight=len(out)), {}


# --- Models of any library.


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


@pytest.mark.sampled(1)
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


# --- PyTorch's loop.


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


# --- Skipped updates.


def adam_with_schedule():
    return optax.adamw(optax.linear_schedule(0.1, 0.01, 10))


@functools.cache
def scaled_step():
    def loss_fn(params, batch, rng):
        return squared_error(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"][None], batch)

    scaler = jt.dynamic_loss_scale(init_scale=1024.0)
    return jt.train_step(loss_fn, adam_with_schedule(), accumulate=3, clip_norm=1.0, loss_scale=scaler)


def scaled_state():
    random = np.random.default_rng(2)
    v = random.normal(size=(8, 2)).astype(np.float32)
    return scaled_step().init({"w": random.normal(size=(4, 8)), "v": v, "b": np.array([-0.0, 0.0], np.float32)})


def batch_with(bad, row):
    batch = copy.deepcopy(BATCH32)
    batch["x"][row, 1] = bad
    return batch


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


# --- The state.


def is_deleted(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


def test_the_state_is_donated_and_the_users_arrays_are_not():
    params = {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 2)), "b": jnp.zeros(2)}
    old = scaled_step().init(params)
    new, _ = scaled_step()(old, BATCH32)
    assert all(is_deleted((old.params, old.opt_state)))
    assert not any(is_deleted(new))
    assert not any(is_deleted(params))
    np.testing.assert_array_equal(params["w"], np.ones((4, 8)))


@pytest.mark.sampled(1)
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


# --- The metrics.


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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


# --- Evaluation.


def test_evaluation_returns_sums_without_a_key_and_keeps_the_state():
    keys = []

    def loss_fn(params, batch, rng, state):
        keys.append(rng)
        loss, _ = squared_error(batch["x"] @ params, batch)
        return loss, {"scalar": batch["x"].mean(), "own": jt.Loss(batch["x"].sum(), 2.0)}, state

    step = jt.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(jnp.ones((4, 2)), model_state={"mean": jnp.ones(4)})
    evaluate = jt.eval_step(loss_fn)
    halves = [evaluate(state, jax.tree.map(lambda x, rows=rows: x[rows], BATCH32)) for rows in (slice(3), slice(3, 12))]
    assert keys == [None, None]
    assert not any(is_deleted(state))
    summed = jax.tree.map(lambda a, b: a + b, *halves)
    assert all(isinstance(value, jt.Loss) for value in summed.values())
    total = ((X @ np.ones((4, 2)) - Y) ** 2).sum()
    np.testing.assert_allclose(summed["loss"].total, total, rtol=1e-5)
    assert float(summed["loss"].weight) == 12
    np.testing.assert_allclose(summed["scalar"].total / summed["scalar"].weight, X.mean(), rtol=1e-4)
    assert float(summed["own"].weight) == 4


def test_evaluation_computes_in_the_given_precision():
    def loss_fn(params, batch, rng):
        out = batch["x"] @ params
        return jt.Loss(out.sum(), len(out)), {}

    def total(precision):
        return float(jt.eval_step(loss_fn, precision=precision)(state, BATCH32)["loss"].total)

    state = jt.train_step(loss_fn, optax.sgd(0.1)).init(jnp.full((4, 2), 1 / 3))
    x, params = jnp.asarray(BATCH32["x"]), state.params
    rounded = (x.astype(jnp.bfloat16) @ params.astype(jnp.bfloat16)).astype(np.float32)
    assert total("bf16") == pytest.approx(float(rounded.sum()), rel=1e-6)
    assert total("fp32") == pytest.approx(float((x @ params).sum()), rel=1e-6)
    assert total("bf16") != pytest.approx(total("fp32"), rel=1e-5)


# --- Errors.


def linear_loss(params, batch, rng):
    return jt.Loss((batch["x"] @ params).sum(), 1), {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, r"precision 'fp8' is unknown: choose one of .*bf16"),
        ({"remat": "some"}, r"remat 'some' is unknown: choose one of none, full"),
        ({"accumulate": 0}, r"accumulate must be an integer of at least 1, or a schedule, got 0$"),
        ({"accumulate": -2}, r"accumulate must be an integer of at least 1, or a schedule, got -2$"),
        ({"accumulate": 2.5}, r"accumulate must be an integer of at least 1, or a schedule, got 2\.5$"),
        ({"clip_norm": 0}, r"clip_norm must be positive, got 0: "),
        ({"clip_norm": -1.5}, r"clip_norm must be positive, got -1\.5: "),
        ({"clip_norm": float("nan")}, r"clip_norm must be positive, got nan: "),
    ],
)
def test_an_invalid_setting_is_refused_with_its_value(arguments, message):
    with pytest.raises(jt.UserError, match=message):
        jt.train_step(linear_loss, optax.sgd(0.1), **arguments)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss.total, r"must return \(jaxtrain\.Loss\(total, weight\), metrics\), got float32\[\]"),
        (lambda loss: loss, r"metrics\), got Loss\(total=float32\[\], weight="),
        (lambda loss: (loss.total, {}), r"metrics\), got \(float32\[\], \{\}\)"),
        (lambda loss: (loss, {}, None), r"metrics\), got \(Loss\("),
        (lambda loss: (loss, None), r"metrics\), got \(Loss\("),
        (lambda loss: None, r"metrics\), got None"),
        (
            lambda loss: (jt.Loss(loss.total * jnp.ones(3), 1), {}),
            r"scalar total.*total=float32\[3\].*use Loss\.of",
        ),
        (
            lambda loss: (jt.Loss(loss.total, jnp.ones(4)), {}),
            r"a scalar total and weight, got .*weight=float32\[4\]",
        ),
    ],
)
def test_a_loss_fn_that_returns_an_invalid_value_is_refused(returned, message, precision):
    step = jt.train_step(
        lambda params, batch, rng: returned(linear_loss(params, batch, rng)[0]), optax.sgd(0.1), precision=precision
    )
    with pytest.raises(jt.UserError, match=message):
        step(step.init(jnp.ones(4)), BATCH32)


def test_fp64_without_x64_mode_is_refused():
    # JAX would train in float32, with a warning at most.
    with pytest.raises(jt.UserError, match="x64"):
        jt.train_step(linear_loss, optax.sgd(0.1), precision="fp64").init(jnp.ones(4))


def test_a_loss_fn_that_does_not_return_its_model_state_is_refused():
    step = jt.train_step(lambda params, batch, rng, state: linear_loss(params, batch, rng), optax.sgd(0.1))
    with pytest.raises(jt.UserError, match=r"metrics, model_state\)"):
        step(step.init(jnp.ones(4), model_state=jnp.zeros(2)), BATCH32)


def test_a_metric_that_is_not_a_scalar_is_refused():
    step = jt.train_step(
        lambda params, batch, rng: (linear_loss(params, batch, rng)[0], {"out": batch["x"]}), optax.sgd(0.1)
    )
    with pytest.raises(jt.UserError, match="out"):
        step(step.init(jnp.ones(4)), BATCH32)


@pytest.mark.parametrize("name", ["loss", "weight", "grad_norm", "skipped"])
def test_a_metric_with_a_reserved_name_is_refused(name):
    step = jt.train_step(
        lambda params, batch, rng: (linear_loss(params, batch, rng)[0], {name: jnp.float32(7)}), optax.sgd(0.1)
    )
    with pytest.raises(jt.UserError, match=name):
        step(step.init(jnp.ones(4)), BATCH32)


BATCH_X = {"x": BATCH32["x"]}


@functools.cache
def linear_step(k=1):
    return jt.train_step(linear_loss, optax.sgd(0.1), accumulate=k)


@pytest.mark.parametrize("call", ["__call__", "micro"])
def test_a_state_of_another_type_is_refused_with_the_call_that_creates_one(call):
    with pytest.raises(jt.UserError, match=r"^state must be a jaxtrain.TrainState, got dict: use step.init\(params\)"):
        getattr(linear_step(), call)({"params": jnp.ones(4)}, BATCH_X)


def test_evaluation_of_a_state_of_another_type_is_refused():
    with pytest.raises(jt.UserError, match=r"state must be a jaxtrain\.TrainState, got dict"):
        jt.eval_step(linear_loss)({"params": jnp.ones(4)}, BATCH_X)


def test_a_torch_optimizer_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(jt.UserError, match=r"^optimizer must be an optax.GradientTransformation, got SGD: .*interop"):
        jt.train_step(linear_loss, optimizer)


def test_an_optimizer_factory_is_refused():
    with pytest.raises(jt.UserError, match=r"got function: call it, as in adamw\(1e-3\)"):
        jt.train_step(linear_loss, optax.adamw)


def test_a_donated_state_used_again_is_refused():
    old = linear_step().init(jnp.ones(4))
    linear_step()(old, BATCH_X)
    with pytest.raises(jt.UserError, match="the state was donated to an earlier call"):
        linear_step()(old, BATCH_X)


def test_torch_tensors_in_the_batch_are_refused():
    with pytest.raises(jt.UserError, match=r"^the batch must hold NumPy or JAX arrays, got a torch.Tensor at x: "):
        linear_step()(linear_step().init(jnp.ones(4)), {"x": torch.ones(12, 4)})


def test_a_scalar_in_an_accumulated_batch_is_refused_by_its_name():
    step = jt.train_step(linear_loss, optax.sgd(0.1), accumulate=2)
    with pytest.raises(jt.UserError, match=r"^scale is a scalar, which cannot be split into 2 micro-batches"):
        step(step.init(jnp.ones(4)), {**BATCH_X, "scale": 2.0})


@pytest.mark.parametrize(
    ("params", "frozen", "message"),
    [
        ({"w": np.ones(4)}, lambda path: path == "v", "^frozen matches no parameter: the paths are w"),
        ({"w": np.ones(4)}, lambda path: True, "^no parameter is trained, frozen matches all of them"),
        ({"w": np.ones(4, np.int32)}, None, "^no parameter is trained, params hold no floating-point array"),
        ({"w": np.ones(4), "scale": 0}, None, "^parameter scale is the Python int 0, which has no gradient: use 0.0"),
    ],
)
def test_parameters_that_would_silently_not_be_trained_are_refused(params, frozen, message):
    step = jt.train_step(linear_loss, optax.sgd(0.1), **({} if frozen is None else {"frozen": frozen}))
    for init in (step.init, step.shapes):
        with pytest.raises(jt.UserError, match=message):
            init(params)


def test_a_python_float_parameter_is_trained():
    def loss_fn(params, batch, rng):
        return jt.Loss((batch["x"] * params["scale"]).sum(), 1), {}

    step = jt.train_step(loss_fn, optax.sgd(1.0))
    state, _ = step(step.init({"scale": 0.0}), {"x": np.ones(3, np.float32)})
    assert float(state.params["scale"]) == -3.0


# --- Loss.of.


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_loss_of_sums_the_unmasked_losses_and_counts_them(dtype):
    losses = jnp.array([[1.0, 2.0, np.inf], [3.0, np.nan, 4.0]])
    mask = np.isfinite(losses).astype(dtype)
    loss, gradient = jax.value_and_grad(lambda losses: jt.Loss.of(losses, mask).total)(losses)
    assert (float(loss), float(jt.Loss.of(losses, mask).weight)) == (10.0, 4.0)
    np.testing.assert_array_equal(gradient, mask.astype(np.float32))
    assert jt.Loss.of(losses[:, :2]).weight == 4


def test_loss_of_low_precision_losses_is_summed_in_float32():
    loss = jt.Loss.of(jnp.ones(1000, jnp.bfloat16), np.ones(1000, bool))
    assert (loss.total.dtype, float(loss.total), float(loss.weight)) == (np.float32, 1000.0, 1000.0)


def test_loss_of_trains_like_an_explicit_total_and_weight():
    def of(params, batch, rng):
        return jt.Loss.of((batch["x"] @ params) ** 2), {}

    def summed(params, batch, rng):
        losses = (batch["x"] @ params) ** 2
        return jt.Loss(losses.sum(), losses.size), {}

    states = []
    for loss_fn in (of, summed):
        step = jt.train_step(loss_fn, optax.sgd(0.1), accumulate=2)
        states.append(step(step.init(jnp.ones(4)), BATCH_X)[0])
    assert_same_bits(states[0].params, states[1].params)


@pytest.mark.parametrize(
    ("losses", "mask", "message"),
    [
        (jnp.float32(1), None, "takes losses per example or per token, got a scalar"),
        (jnp.ones((2, 3)), jnp.ones(2), r"mask must have the shape of losses \[2, 3\], got \[2\]"),
    ],
)
def test_loss_of_a_scalar_or_with_a_mask_of_another_shape_is_refused(losses, mask, message):
    with pytest.raises(jt.UserError, match=message):
        jt.Loss.of(losses, mask)
