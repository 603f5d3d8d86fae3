"""Imported modules under JAX's transformations and the options of a training step, beside PyTorch in float64."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.passes.memory.remat import remat
from jaxtrain.step import averaged

WIDTH, LENGTH = 8, 3


class Layer(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + F.dropout(F.gelu(self.out(mixed)), self.rate, self.training)


class Network(nn.Module):
    """Layers that are a loop, and a parameter that is not trained."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(rate) for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).pow(2).mean((1, 2))


def loss(y: Any, batch: Any) -> jt.Loss:
    return jt.Loss.of(y)


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((count, LENGTH, WIDTH))}


def test_a_batch_of_seeds_is_mapped_over() -> None:
    with jax.enable_x64():
        model = jt.from_torch(Network(0.5).double(), rows(2))
        keys = jax.random.split(jax.random.key(0), 3)
        grad = jax.jit(jax.grad(lambda params, key: model(params, rows(2), key)[0].sum()))
        mapped = jax.jit(jax.vmap(grad, (None, 0)))(model.params, keys)
        each = [grad(model.params, key) for key in keys]
        jax.tree.map(lambda x, *y: np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-11, atol=1e-14), mapped, *each)
        assert not np.allclose(*mapped["layers.*.out.bias"][:2])


def test_second_derivatives_are_pytorchs() -> None:
    module = Network().double()
    names, weights = zip(*((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True)
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernel has no second derivative
        grads = torch.autograd.grad(module(torch.tensor(rows(2)["x"])).sum(), weights, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), weights, allow_unused=True)
    expected = dict(zip(names, second, strict=True))
    with jax.enable_x64():
        model = jt.from_torch(module, rows(2))
        grad = jax.grad(lambda params: model(params, rows(2))[0].sum())

        def squared_norm(params: Any) -> Any:
            return sum((g**2).sum() for name, g in grad(params).items() if not model.frozen(name))

        def products(params: Any) -> Any:
            gradient = {name: 0 * g if model.frozen(name) else g for name, g in grad(params).items()}
            return jax.grad(squared_norm)(params), jax.jvp(grad, (params,), (gradient,))[1]

        reverse, forward = map(model.names.to_torch, jax.jit(products)(model.params))
    for name, value in expected.items():
        # 2 H g: the gradient of |g|², by two passes backward and by one forward over one backward.
        theirs = np.zeros(reverse[name].shape) if value is None else value.numpy()
        np.testing.assert_allclose(reverse[name], theirs, rtol=1e-9, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(2 * forward[name], theirs, rtol=1e-9, atol=1e-13, err_msg=name)


def test_rematerialization_changes_no_bit() -> None:
    with jax.enable_x64():
        model = jt.from_torch(Network(0.5).double(), rows(2))

        def total(params: Any, key: jax.Array) -> Any:
            return model(params, rows(2), key)[0].sum()

        results = [
            jax.jit(jax.value_and_grad(remat(total, policy)))(model.params, jax.random.key(0))
            for policy in ("none", "full", "dots")
        ]
        for result in results[1:]:
            jax.tree.map(np.testing.assert_array_equal, result, results[0])
        with pytest.raises(jt.UserError, match="names:hidden"):
            jax.grad(remat(total, "names:hidden"))(model.params, jax.random.key(0))


def test_options_of_a_step_together_train_as_pytorch() -> None:
    """Micro-batches, a smaller last batch, clipping, frozen parameters and a moving average."""
    module = Network().double()
    with jax.enable_x64():
        model = jt.from_torch(module, rows(2))
        theirs = copy.deepcopy(module)
        theirs.layers.requires_grad_(False)
        for layer in theirs.layers:
            layer.out.requires_grad_(True)
        trained = [p for p in theirs.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        average = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        step = jt.train_step(
            model.loss(loss),
            optim.adamw(1e-2),
            **{"precision": "fp64", "accumulate": 2, "clip_norm": 0.05, "ema": 0.9, "allow_recompile": 1},
            frozen=lambda path: model.frozen(path) or ".out." not in path,
        )
        state = step.init(model.params)
        for i, count in enumerate((4, 4, 2)):
            state, metrics = step(state, rows(count, i))
            optimizer.zero_grad()
            expected = theirs(torch.tensor(rows(count, i)["x"])).mean()
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 0.05)
            optimizer.step()
            average.update_parameters(theirs)
            np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-10)
            assert norm > 0.05
        for tree, side in ((state.params, theirs), (averaged(state).params, average.module)):
            for name, value in model.names.to_torch(tree).items():
                np.testing.assert_allclose(value, side.get_parameter(name).detach(), rtol=1e-9, atol=1e-13)


def test_an_overflow_in_fp16_halves_the_scale_and_skips_the_update() -> None:
    model = jt.from_torch(Network(), rows(2))
    scale = jt.dynamic_loss_scale(init_scale=2.0**24, growth_interval=100)
    step = jt.train_step(model.loss(loss), optim.adamw(1e-2), precision="fp16", loss_scale=scale, frozen=model.frozen)
    state, losses, skipped = step.init(model.params), [], []
    for _ in range(16):
        state, metrics = step(state, rows(2))
        losses.append(float(metrics["loss"]))
        skipped.append(bool(metrics["skipped"]))
    count = sum(skipped)
    assert 0 < count < 14
    assert skipped == [True] * count + [False] * (16 - count)
    assert losses[: count + 1] == [losses[0]] * (count + 1)
    assert losses[-1] < losses[0]
    assert float(state.loss_scale.scale) == 2.0 ** (24 - count)
