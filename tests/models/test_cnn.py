"""The CNN equals PyTorch's `Sequential`, in the dtype of its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain.models import CNN, functional
from jaxtrain.models.cnn import torch_names
from tests.models.programs import assert_float64_throughout

SHAPE, WIDTH = (6, 5, 3), 4
IMAGES = np.random.default_rng(0).normal(size=(2, *SHAPE))


def model():
    return functional(CNN(SHAPE, WIDTH, classes=7, rngs=nnx.Rngs(0)))


def test_images_give_logits():
    apply, params = model()
    assert apply(params, jnp.ones((2, *SHAPE))).shape == (2, 7)
    assert params["conv"]["kernel"].shape == (3, 3, 3, WIDTH)
    assert params["head"]["kernel"].shape == (4 * 3 * WIDTH, 7)


def test_logits_equal_torchs_sequential_in_float64():
    apply, params = model()
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(3, WIDTH, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 3 * WIDTH, 7)
    ).double()
    tensors = {name: t.numpy() for name, t in theirs.state_dict().items()}
    with jax.enable_x64(True):
        ours = apply(torch_names(SHAPE, WIDTH).to_jax(tensors, like=params), IMAGES)
    expected = theirs(torch.tensor(IMAGES.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(ours, expected.detach(), rtol=1e-12, atol=1e-14)


def test_float64_stays_float64_throughout():
    apply, params = model()
    assert_float64_throughout(jax.value_and_grad(lambda p: apply(p, IMAGES).sum()), params)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_dropout_is_applied_to_activations_only_with_a_key(batch_norm):
    def logits(dropout, rng):
        model = CNN(SHAPE, WIDTH, batch_norm=batch_norm, dropout=dropout, rngs=nnx.Rngs(0))
        model.head.kernel[...] = jnp.ones_like(model.head.kernel)
        return model(jnp.asarray(IMAGES, np.float32), True, rng)

    np.testing.assert_array_equal(logits(0.5, None), logits(0.0, None))
    np.testing.assert_array_equal(logits(0.0, jax.random.key(0)), logits(0.0, None))
    assert not np.array_equal(logits(0.5, jax.random.key(0)), logits(0.5, None))
    np.testing.assert_array_equal(logits(1 - 2**-20, jax.random.key(0)), 0)
