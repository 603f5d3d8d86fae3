"""Shared layers equal PyTorch's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.models import functional
from jaxtrain.models.layers.layer_norm import LayerNorm, layer_norm_gradient, merged_moments
from jaxtrain.models.layers.linear import Linear, product


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (3000.0, 1.0), (0.0, 1e-3)])
def test_layer_norm_and_its_gradients_equal_pytorch(shift, scale):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 5, 8)) * scale + shift, rng.standard_normal((3, 5, 8))
    theirs = torch.nn.LayerNorm(8, eps=1e-5).double()
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(rng.uniform(0.5, 2, 8)))
        theirs.bias.copy_(torch.from_numpy(rng.standard_normal(8)))
    given = torch.tensor(x, requires_grad=True)
    (theirs(given) * torch.from_numpy(weights)).sum().backward()
    apply, _ = functional(LayerNorm(8, 1e-5))
    with jax.enable_x64(True):
        params = {"scale": jnp.asarray(theirs.weight.detach()), "bias": jnp.asarray(theirs.bias.detach())}
        y, pull = jax.vjp(apply, params, jnp.asarray(x))
        grads, dx = pull(jnp.asarray(weights))
        rows = (p.reshape(1, 1, -1) for p in params.values())
        on_gpu = layer_norm_gradient(jnp.asarray(x), *rows, jnp.asarray(weights), epsilon=1e-5)
    for ours, expected in (
        *zip(
            (value.reshape(-1) for value in on_gpu),
            (given.grad.reshape(-1), theirs.weight.grad, theirs.bias.grad),
            strict=True,
        ),
        (y, theirs(given).detach()),
        (dx, given.grad),
        (grads["scale"], theirs.weight.grad),
        (grads["bias"], theirs.bias.grad),
    ):
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-8, atol=1e-10 * np.abs(expected.numpy()).max())


def test_the_moments_of_any_two_parts_are_merged():
    def moments(pairs):
        means = pairs.mean(1) if pairs.size else np.zeros(2)
        x, y = pairs - means[:, None]
        return np.array([pairs.shape[1], *means, (x * x).sum(), (x * y).sum()])

    pairs = np.random.default_rng(0).normal([[3.0], [-5.0]], size=(2, 7))
    with jax.enable_x64(True):
        for end in range(8):
            merged = merged_moments(moments(pairs[:, :end]), moments(pairs[:, end:]))
            np.testing.assert_allclose(merged, moments(pairs), rtol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 5, 4), (2, 1, 3, 4)])
def test_a_linear_layer_takes_any_axes_before_the_last(shape):
    layer = Linear(4, 3, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    plain = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    assert layer(x).shape == (*shape[:-1], 3)
    np.testing.assert_allclose(layer(x), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(product(x, layer.kernel[...]), x @ np.asarray(layer.kernel[...]), rtol=1e-5, atol=1e-6)


def test_the_weight_gradient_is_one_matrix_product():
    x = jax.ShapeDtypeStruct((2, 5, 4), np.float32)
    kernel = jax.ShapeDtypeStruct((4, 3), np.float32)
    traced = jax.make_jaxpr(jax.grad(lambda kernel, x: product(x, kernel).sum()))(kernel, x)
    contracted = [e.params["dimension_numbers"][0] for e in traced.eqns if e.primitive.name == "dot_general"]
    assert contracted[-1] == ((0,), (0,))
