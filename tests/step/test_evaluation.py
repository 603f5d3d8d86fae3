"""Evaluation steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests.step.regression import BATCH32, X, Y, is_deleted, squared_error


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
