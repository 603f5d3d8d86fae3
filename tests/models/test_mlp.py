"""The MLP equals PyTorch's `Sequential`, in the dtype of its parameters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxtrain.models import MLP, functional
from jaxtrain.models.mlp import torch_names
from tests.models.programs import assert_float64_throughout

SIZES = (12, 6, 5, 3)
IMAGES = np.random.default_rng(0).normal(size=(4, 2, 2, 3))


def test_images_of_any_shape_give_logits():
    apply, params = functional(MLP(SIZES, rngs=nnx.Rngs(0)))
    assert apply(params, jnp.ones((4, 2, 2, 3))).shape == (4, 3)
    assert apply(params, jnp.ones((4, 12))).shape == (4, 3)


def test_logits_equal_torchs_sequential_in_float64():
    apply, params = functional(MLP(SIZES, rngs=nnx.Rngs(0)))
    layers = [torch.nn.Flatten()]
    for n, m in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(n, m, dtype=torch.float64), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    with jax.enable_x64(True):
        theirs = torch_names(3).to_jax({name: t.numpy() for name, t in model.state_dict().items()}, like=params)
        ours = apply(theirs, IMAGES)
    np.testing.assert_allclose(ours, model(torch.tensor(IMAGES)).detach(), rtol=1e-12, atol=1e-14)


def test_float64_stays_float64_throughout():
    apply, params = functional(MLP(SIZES, rngs=nnx.Rngs(0)))
    assert_float64_throughout(jax.value_and_grad(lambda p: apply(p, IMAGES).sum()), params)


def test_dropout_follows_every_relu_only_with_a_key(drawn_masks):
    apply, params = functional(MLP(SIZES, dropout=0.5, rngs=nnx.Rngs(0)))
    plain, _ = functional(MLP(SIZES, rngs=nnx.Rngs(0)))
    x = jnp.asarray(IMAGES, np.float32)
    np.testing.assert_array_equal(apply(params, x), plain(params, x))
    np.testing.assert_array_equal(plain(params, x, jax.random.key(0)), plain(params, x))
    assert drawn_masks == []
    assert not np.array_equal(apply(params, x, jax.random.key(0)), plain(params, x))
    keys, shapes = zip(*drawn_masks, strict=True)
    assert shapes == ((4, 6), (4, 5))
    assert len(set(keys)) == 2
