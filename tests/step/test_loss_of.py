"""`Loss.of`: the total and the weight of losses per example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests.step.regression import INPUTS, assert_same_bits


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
        states.append(step(step.init(jnp.ones(4)), INPUTS)[0])
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
