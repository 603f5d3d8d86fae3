"""Gradient hooks compared with `torch.Tensor.register_hook` in a loop with GradScaler, accumulation and clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

import jaxtrain as jt
from jaxtrain.step.loss_scale import dynamic_loss_scale

W1, W2 = np.random.default_rng(0).normal(size=(2, 3, 3))
BATCH = {"x": np.random.default_rng(1).normal(size=(8, 3)), "y": np.random.default_rng(2).normal(size=(8, 3))}
SCALE = 4.0


def loss_fn(params, batch, rng):
    hidden = checkpoint_name(jnp.tanh(batch["x"] @ params["first"]["w"]), "hidden")
    error = hidden @ params["second"]["w"] - batch["y"]
    return jt.Loss((error**2).sum(), weight=len(error)), {}


# Nonlinear, so that it matters that a hook receives the scaled gradient of each micro-batch.
JAX_HOOKS = {
    "first/w": lambda g: g.clip(-0.5, 0.5),
    "hidden": lambda g: jnp.where(jnp.abs(g) > 0.1, g, 0.0),
    "second/w": lambda g: 2 * g,
}
TORCH_HOOKS = {
    "first/w": lambda g: g.clamp(-0.5, 0.5),
    "hidden": lambda g: torch.where(g.abs() > 0.1, g, 0.0),
    "second/w": lambda g: 2 * g,
}


def torch_run(hooks, k, steps):
    first, second = (torch.tensor(w, requires_grad=True) for w in (W1, W2))
    for name, p in {"first/w": first, "second/w": second}.items():
        if name in hooks:
            p.register_hook(hooks[name])
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for _ in range(steps):
        for x, y in zip(torch.tensor(BATCH["x"]).chunk(k), torch.tensor(BATCH["y"]).chunk(k), strict=True):
            hidden = torch.tanh(x @ first)
            if "hidden" in hooks:
                hidden.register_hook(hooks["hidden"])
            scaler.scale(((hidden @ second - y) ** 2).sum() / len(x) / k).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([first, second], 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in (first, second)]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("names", [("first/w",), ("hidden",), ("first/w", "hidden", "second/w")])
def test_training_with_hooks_equals_pytorch(names, k):
    with jax.enable_x64(True):
        step = jt.train_step(
            loss_fn,
            optax.sgd(0.1),
            precision="fp64",
            accumulate=k,
            clip_norm=1.0,
            loss_scale=dynamic_loss_scale(SCALE),
            hooks={name: JAX_HOOKS[name] for name in names},
        )
        state = step.init({"first": {"w": W1}, "second": {"w": W2}})
        for _ in range(3):
            state, _ = step(state, BATCH)
        ours = [np.asarray(w) for w in jax.tree.leaves(state.params)]
    theirs = torch_run({name: TORCH_HOOKS[name] for name in names}, k, steps=3)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    without = torch_run({}, k, steps=3)
    assert not np.allclose(ours[0], without[0], rtol=1e-3)


def test_a_hook_works_within_a_scan_under_autocast_and_remat():
    def scanned(params, batch, rng):
        def layer(x, w):
            return jt.block(lambda x, w: checkpoint_name(jnp.tanh(x @ w), "hidden"))(x, w), None

        x, _ = jax.lax.scan(layer, batch["x"].astype(np.float32), params)
        return jt.Loss(x.sum(), weight=1), {}

    weights = np.float32(np.stack([W1, W2]))
    seen = []

    def zeroed(gradient):
        seen.append(gradient.dtype)
        return 0 * gradient

    for hooks in ({}, {"hidden": zeroed}):
        step = jt.train_step(scanned, optax.sgd(1.0), precision="bf16", remat="full", hooks=hooks)
        state, _ = step(step.init(weights), BATCH)
        assert bool((state.params == weights).all()) == bool(hooks)
    assert seen


def test_hook_transforms_the_gradient_of_an_activation():
    gradient = jax.grad(lambda x: jt.hook(jnp.sin(x), lambda g: -g).sum())
    np.testing.assert_array_equal(gradient(jnp.arange(3.0)), -jnp.cos(jnp.arange(3.0)))
    second = jax.grad(lambda x: gradient(x).sum())(jnp.arange(3.0))
    np.testing.assert_allclose(second, jnp.sin(jnp.arange(3.0)), rtol=1e-6)


def test_a_hook_that_matches_nothing_is_refused():
    step = jt.train_step(loss_fn, optax.sgd(0.1), hooks={"third/w": lambda g: g})
    params = {"first": {"w": np.float32(W1)}, "second": {"w": np.float32(W2)}}
    batch = jax.tree.map(np.float32, BATCH)
    message = "hook 'third/w' matches no parameter and no checkpoint_name: use one of first/w, hidden, second/w"
    with pytest.raises(jt.UserError, match=message):
        step(step.init(params), batch)
