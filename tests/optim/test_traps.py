"""Cases where optax differs from PyTorch and this package does not; a test fails if optax changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxtrain.optim import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    muon,
    nadam,
    radam,
    rmsprop,
    rprop,
    schedules,
    sgd,
)

STEPS = 30
START = np.linspace(-1, 1, 12).reshape(3, 4)
GRADIENTS = np.random.default_rng(0).standard_normal((STEPS, 3, 4))
LR = 0.01


def falling(t):
    return LR * (1 - t / STEPS)


def falling_in_jax(t):
    return falling(t.astype(np.float64))


def torch_change(make, scheduled=False):
    torch.set_default_dtype(torch.float64)
    try:
        p = torch.tensor(START, requires_grad=True)
        optimizer = make([p])
        for t in range(STEPS):
            if scheduled:
                optimizer.param_groups[0]["lr"] = falling(t)
            p.grad = torch.tensor(GRADIENTS[t])
            optimizer.step()
        return p.detach().numpy() - START
    finally:
        torch.set_default_dtype(torch.float32)


def jax_change(make):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx = make()

        def update(carry, g):
            p, state = carry
            updates, state = tx.update(g, state, p)
            return (optax.apply_updates(p, updates), state), None

        p = jnp.asarray(START)
        (p, _), _ = jax.jit(lambda p, g: jax.lax.scan(update, (p, tx.init(p)), g))(p, jnp.asarray(GRADIENTS))
        return np.asarray(p) - START


def relative_error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def l2(make, weight_decay=0.1):
    return lambda: optax.chain(optax.add_decayed_weights(weight_decay), make)


T = torch.optim
P = functools.partial

# trap: (PyTorch's, ours, optax's, least relative error of optax's update, 0 if equal)
TRAPS = {
    "adam": (P(T.Adam, lr=LR), P(adam, LR), P(optax.adam, LR), 0),
    "adamw decays by 1e-2": (P(T.AdamW, lr=LR), P(adamw, LR), P(optax.adamw, LR), 1e-3),
    "adam decays in the gradient": (
        P(T.Adam, lr=LR, weight_decay=0.1),
        P(adam, LR, weight_decay=0.1),
        P(optax.adamw, LR, weight_decay=0.1),
        1e-2,
    ),
    "adam, with L2 before": (
        P(T.Adam, lr=LR, weight_decay=0.1),
        P(adam, LR, weight_decay=0.1),
        l2(optax.adam(LR)),
        0,
    ),
    "eps inside the root": (P(T.Adam, lr=LR), P(adam, LR), P(optax.adam, LR, eps=0.0, eps_root=1e-3), 1e-5),
    "rmsprop's defaults": (P(T.RMSprop, lr=LR), P(rmsprop, LR), P(optax.rmsprop, LR), 1e-1),
    "rmsprop's eps": (P(T.RMSprop, lr=LR, eps=1e-3), P(rmsprop, LR, eps=1e-3), P(optax.rmsprop, LR, 0.99, 1e-3), 1e-3),
    "rmsprop, eps outside": (
        P(T.RMSprop, lr=LR),
        P(rmsprop, LR),
        P(optax.rmsprop, LR, 0.99, eps_in_sqrt=False),
        0,
    ),
    "sgd's dampening": (
        P(T.SGD, lr=LR, momentum=0.9, dampening=0.5),
        P(sgd, LR, 0.9, 0.5),
        lambda: optax.chain(optax.scale(0.5), optax.sgd(LR, 0.9)),
        1e-2,
    ),
    "sgd with nesterov": (
        P(T.SGD, lr=LR, momentum=0.9, nesterov=True),
        P(sgd, LR, 0.9, nesterov=True),
        P(optax.sgd, LR, 0.9, True),
        0,
    ),
    "adagrad's defaults": (P(T.Adagrad, lr=LR), P(adagrad, LR), P(optax.adagrad, LR), 1e-2),
    "adagrad's eps": (
        P(T.Adagrad, lr=LR, eps=1e-3),
        P(adagrad, LR, eps=1e-3),
        P(optax.adagrad, LR, 0.0, 1e-3),
        1e-4,
    ),
    "amsgrad": (
        P(T.Adam, lr=LR, amsgrad=True),
        P(adam, LR, amsgrad=True),
        P(optax.amsgrad, LR),
        1e-2,
    ),
    "nadam": (P(T.NAdam, lr=LR), P(nadam, LR), P(optax.nadam, LR), 1e-2),
    "radam's eps": (P(T.RAdam, lr=LR, eps=1e-3), P(radam, LR, eps=1e-3), P(optax.radam, LR, eps=1e-3), 1e-3),
    "adadelta": (
        P(T.Adadelta, lr=LR),
        P(adadelta, LR),
        P(optax.adadelta, LR),
        0,
    ),
    "adamax": (P(T.Adamax, lr=LR), P(adamax, LR), P(optax.adamax, LR), 0),
    "rprop": (P(T.Rprop, lr=LR), P(rprop, LR), P(optax.rprop, LR), 1e-2),
    "adafactor": (P(T.Adafactor, lr=LR), P(adafactor, LR), P(optax.adafactor, LR), 1e-2),
    "muon": (P(T.Muon, lr=LR), P(muon, LR, dtype=np.float64, out_axis=0), P(optax.contrib.muon, LR), 1e-2),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_optimizers_equal_pytorch_where_optax_does_not(trap, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
    theirs, ours, naive, least = TRAPS[trap]
    truth = torch_change(theirs)
    assert relative_error(jax_change(ours), truth) <= 1e-12
    error = relative_error(jax_change(naive), truth)
    assert error > least if least else error <= 1e-12


def test_rmsprop_applies_the_learning_rate_after_momentum():
    truth = torch_change(P(T.RMSprop, lr=LR, momentum=0.9), scheduled=True)
    assert relative_error(jax_change(lambda: rmsprop(falling_in_jax, momentum=0.9)), truth) <= 1e-12
    naive = jax_change(lambda: optax.rmsprop(falling_in_jax, 0.99, eps_in_sqrt=False, momentum=0.9))
    assert relative_error(naive, truth) > 0.1


@pytest.mark.parametrize(
    ("make", "ours", "naive"),
    [
        pytest.param(
            lambda o: T.lr_scheduler.CosineAnnealingLR(o, 10),
            schedules.cosine_annealing_lr(1.0, 10),
            optax.cosine_decay_schedule(1.0, 10),
            id="a cosine rises again",
        ),
        pytest.param(
            lambda o: T.lr_scheduler.LinearLR(o),
            schedules.linear_lr(1.0),
            optax.linear_schedule(0.0, 1.0, 5),
            id="LinearLR begins at a third",
        ),
        pytest.param(
            lambda o: T.lr_scheduler.OneCycleLR(o, 1.0, 20, cycle_momentum=False),
            schedules.one_cycle_lr(1.0, 20),
            optax.cosine_onecycle_schedule(20, 1.0),
            id="OneCycleLR peaks one earlier",
        ),
    ],
)
def test_schedules_equal_pytorch_where_optax_does_not(make, ours, naive):
    optimizer = T.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    truth = []
    for _ in range(20):
        truth.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(truth) < 20:
            scheduler.step()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rates, naive_rates = (np.asarray(jax.vmap(f)(jnp.arange(20))) for f in (ours, naive))
    np.testing.assert_allclose(rates, truth, rtol=1e-12, atol=1e-15)
    assert np.max(np.abs(naive_rates - truth)) > 0.04


def test_a_zero_gradient_is_not_a_missing_gradient():
    """PyTorch skips a gradient of None; here it is 0, which has the same effect as 0 in PyTorch."""

    def run(gradients):
        p = torch.ones(1, requires_grad=True)
        optimizer = T.AdamW([p], lr=LR, weight_decay=0.5)
        for g in gradients:
            p.grad = g
            optimizer.step()
        return p.item()

    tx = adamw(LR, weight_decay=0.5)
    p = jnp.ones(1)
    state = tx.init(p)
    for g in (1.0, 0.0):
        updates, state = tx.update(jnp.full(1, g), state, p)
        p = p + updates
    np.testing.assert_allclose(p[0], run([torch.ones(1), torch.zeros(1)]), rtol=1e-6)
    assert abs(float(p[0]) - run([torch.ones(1), None])) > 1e-3
