"""Moments in 8 bits in a training step: skipped updates, windows, groups, the average, memory and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.optim import adamw8bit, groups, sgd8bit
from jaxtrain.paths import none_frozen
from jaxtrain.planning import state_parts
from jaxtrain.runner import Checkpoints


def loss_fn(params, batch, rng):
    del rng
    h = jnp.tanh(batch["x"] @ params["body"])
    return jt.Loss(((h @ params["head"]) ** 2).sum(), jnp.asarray(float(len(batch["x"])))), {}


def test_skips_windows_groups_memory_and_checkpoints(tmp_path):
    tx = groups(lambda path: path, {"body": adamw8bit(1e-2), "head": sgd8bit(1e-2, float32=("*",))})
    step = jt.train_step(loss_fn, tx, precision="fp16", accumulate=2, ema=0.9, loss_scale=jt.dynamic_loss_scale(8.0))
    params = {"body": jnp.full((64, 96), 0.01), "head": jnp.full((96, 64), 0.01)}
    state = step.init(params, seed=0)
    rng = np.random.default_rng(0)
    clean = {"x": rng.standard_normal((4, 64), np.float32)}
    state, _ = step(state, clean)
    before = jax.device_get(state)
    overflow = {"x": np.where(np.arange(4)[:, None] == 3, np.float32(1e30), clean["x"])}
    state, metrics = step(state, overflow)
    assert metrics["skipped"]
    assert_same_bits((before.opt_state, before.ema), (state.opt_state, state.ema))
    state, metrics = step(state, clean)
    assert not metrics["skipped"]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(step.shapes(params))
    assert_same_bits(state.opt_state, restored.opt_state)
    parts = {(part.name, part.dtype): part.bytes for part in state_parts(state, none_frozen)}
    # Two codes for each of 6,144 elements and two magnitudes for each of 24 blocks.
    assert parts["optimizer state", "8-bit"] == 2 * 64 * 96 + 2 * 4 * 24
    # The momentum of the head and the learning rates.
    assert parts["optimizer state", "float32"] == 4 * 64 * 96 + 8


def test_streamed_windows_and_injected_hyperparameters_are_those_of_whole_windows():
    params = {"body": jnp.linspace(-0.1, 0.1, 64 * 96).reshape(64, 96), "head": jnp.full((96, 64), 0.02)}
    rng = np.random.default_rng(0)
    batches = [{"x": rng.standard_normal((8, 64), np.float32)} for _ in range(4)]
    step = jt.train_step(loss_fn, adamw8bit(1e-2), accumulate=2)
    injected = jt.train_step(loss_fn, optax.inject_hyperparams(adamw8bit)(learning_rate=1e-2), accumulate=2)
    whole, streamed = step.init(params), step.init(params, streaming=True)
    # The learning rate is an array: its product with the update is rounded once more, which after another update may
    # move a moment to the next of 256 numbers.
    first, by_injected = (first_step(first_step.init(params), batches[0])[0].params for first_step in (step, injected))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(by_injected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    for batch in batches:
        whole, _ = step(whole, batch)
        for half in np.split(batch["x"], 2):
            streamed, _ = step.micro(streamed, {"x": half})
    assert_same_bits((whole.params, whole.opt_state), (streamed.params, streamed.opt_state))


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
