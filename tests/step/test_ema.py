"""The moving average of the parameters equals `torch.optim.swa_utils.AveragedModel`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import jaxtrain as jt

BATCHES = np.random.default_rng(0).standard_normal((6, 4, 3))


def loss_fn(params, batch, rng):
    return jt.Loss(((batch @ params["w"] - 1) ** 2).sum(), len(batch)), {}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_average_equals_pytorchs_after_every_update(decay, streaming):
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with jax.enable_x64(True):
        step = jt.train_step(loss_fn, optax.sgd(0.1), precision="fp64", accumulate=2, ema=decay)
        state = step.init({"w": np.full((3, 1), 0.5)}, streaming=streaming)
        for batch in BATCHES:
            optimizer.zero_grad()
            (((model(torch.from_numpy(batch)) - 1) ** 2).sum() / len(batch)).backward()
            optimizer.step()
            average.update_parameters(model)
            if streaming:
                for half in (batch[:2], batch[2:]):
                    state, _ = step.micro(state, half)
            else:
                state, _ = step(state, batch)
            expected = average.module.weight.detach().numpy().T
            assert np.linalg.norm(np.asarray(state.ema["w"]) - expected) <= 1e-14 * np.linalg.norm(expected)


def test_skipped_updates_do_not_change_the_average_or_count_as_the_first():
    step = jt.train_step(loss_fn, optax.sgd(0.1), ema=0.9, loss_scale=jt.dynamic_loss_scale(2.0))
    good = [batch.astype(np.float32) for batch in BATCHES]
    bad = np.full_like(good[0], np.inf)
    start = {"w": np.full((3, 1), 0.5)}
    clean, skipping = step.init(start), step.init(start)
    for batch in good[:3]:
        clean, _ = step(clean, batch)
    for batch in (bad, good[0], bad, good[1], good[2], bad):
        before = np.asarray(skipping.ema["w"]).copy()
        skipping, metrics = step(skipping, batch)
        assert bool(metrics["skipped"]) == (np.asarray(skipping.ema["w"]) == before).all()
    np.testing.assert_array_equal(clean.ema["w"], skipping.ema["w"])


def test_the_average_can_be_evaluated_and_does_not_change_training():
    with_ema, without = (jt.train_step(loss_fn, optax.sgd(0.1), ema=decay) for decay in (0.9, None))
    a, b = with_ema.init({"w": np.full((3, 1), 0.5)}), without.init({"w": np.full((3, 1), 0.5)})
    for batch in BATCHES.astype(np.float32):
        a, _ = with_ema(a, batch)
        b, _ = without(b, batch)
    np.testing.assert_array_equal(a.params["w"], b.params["w"])
    assert b.ema is None
    evaluate = jt.eval_step(loss_fn)
    batch = BATCHES[0].astype(np.float32)
    evaluated = evaluate(a._replace(params=a.ema), batch)["loss"].total
    np.testing.assert_allclose(evaluated, ((batch @ np.asarray(a.ema["w"]) - 1) ** 2).sum(), rtol=1e-6)


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_an_ema_decay_outside_its_range_is_refused(decay):
    with pytest.raises(jt.UserError, match="ema"):
        jt.train_step(loss_fn, optax.sgd(0.1), ema=decay)


def test_leaves_that_are_not_floating_point_are_copied():
    from jaxtrain.step.update.ema import update_ema

    average = update_ema({"n": jnp.array(1)}, {"n": jnp.array(5)}, 0.9, is_first=False)
    assert int(average["n"]) == 5
