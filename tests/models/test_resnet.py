"""ResNet: its layers, its small stem, PyTorch's padding and pooling, and the config.json of `transformers`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import CONV
from jaxtrain.models import functional, functional_with_state
from jaxtrain.models.layers.padded_convolution import conv, max_pool
from jaxtrain.models.resnet import (
    RESNET_18,
    RESNET_34,
    RESNET_50,
    ResNet,
    ResNetConfig,
    from_hf,
    to_hf,
    torch_buffers,
    torch_names,
)
from jaxtrain.passes.memory.remat import remat
from tests.models.programs import assert_float64_throughout

CONFIG = ResNetConfig(embedding_size=4, hidden_sizes=(4, 8), depths=(2, 1), layer_type="basic", num_labels=5)
BOTTLENECK = dataclasses.replace(CONFIG, layer_type="bottleneck", hidden_sizes=(8, 16), depths=(1, 2))
IMAGES = np.random.default_rng(0).standard_normal((3, 16, 16, 3)).astype(np.float32)


def model(config=CONFIG):
    apply, params, state = functional_with_state(ResNet(config, rngs=nnx.Rngs(0)))
    return jax.jit(apply, static_argnums=3), params, state


@pytest.mark.parametrize(
    ("config", "parameters"), [(RESNET_18, 11_689_512), (RESNET_34, 21_797_672), (RESNET_50, 25_557_032)]
)
def test_parameter_counts_equal_torchvision(config, parameters):
    # num_params of resnet18, resnet34 and resnet50 in torchvision's documentation.
    _, params, _ = functional_with_state(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


def test_only_training_uses_batch_statistics_and_updates_the_running_ones():
    apply, params, state = model()
    logits, unchanged = apply(params, state, IMAGES, False)
    assert logits.shape == (3, 5)
    jax.tree.map(np.testing.assert_array_equal, unchanged, state)
    trained, updated = apply(params, state, IMAGES, True)
    assert not np.array_equal(trained, logits)
    counts = [leaf for leaf in jax.tree.leaves(updated) if leaf.dtype == np.int32]
    # The stem, two convolutions in each of three layers, one shortcut.
    assert counts == [1] * 8
    assert jax.tree.all(jax.tree.map(lambda a, b: not np.array_equal(a, b), updated, state))
    # In evaluation a row of the batch changes no other.
    changed = IMAGES.copy()
    changed[1] += 1
    np.testing.assert_allclose(apply(params, state, changed, False)[0][::2], logits[::2], rtol=1e-5)


def test_a_small_stem_keeps_the_resolution():
    small = dataclasses.replace(CONFIG, stem_kernel=3, stem_stride=1, stem_pool=False)
    apply, params, state = model(small)
    assert params["embedder"]["convolution"]["kernel"].shape == (3, 3, 3, 4)
    assert apply(params, state, IMAGES[:, :2, :2], False)[0].shape == (3, 5)
    with pytest.raises(UserError, match=r"stem_kernel 3 does not exist in a config\.json"):
        to_hf(small)


def test_every_layer_is_a_unit_of_rematerialisation():
    apply, params, state = functional_with_state(ResNet(CONFIG, rngs=nnx.Rngs(0)))
    whole = remat(lambda params: apply(params, state, IMAGES, True), "full")
    assert str(jax.make_jaxpr(whole)(params)).count("policy=") == 3
    named = remat(lambda params: apply(params, state, IMAGES, True)[0].sum(), "names:hidden")
    jax.make_jaxpr(jax.grad(named))(params)


def test_float64_stays_float64_throughout():
    apply, params, state = model()

    def gradient(params_and_state):
        params, state = params_and_state
        return jax.grad(lambda params: apply(params, state, IMAGES.astype(np.float64), True)[0].sum())(params)

    assert_float64_throughout(gradient, (params, state))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        BOTTLENECK,
        dataclasses.replace(BOTTLENECK, downsample_in_bottleneck=True, downsample_in_first_stage=True),
    ],
)
def test_names_and_configuration_equal_transformers(config):
    written = json.loads(json.dumps(to_hf(config)))
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(**written)).eval()
    apply, params, state = model(config)
    names, buffers = torch_names(config), torch_buffers(config)
    assert names.torch_order(params) == [name for name, _ in theirs.named_parameters()]
    assert buffers.torch_order(state) == [name for name, _ in theirs.named_buffers()]
    assert from_hf(theirs.config.to_dict()) == config
    # Running statistics that differ from the initial ones.
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    params, state = (
        table.to_jax({name: tensor.detach().numpy() for name, tensor in tensors}, like=like)
        for table, tensors, like in (
            (names, theirs.named_parameters(), params),
            (buffers, theirs.named_buffers(), state),
        )
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(IMAGES.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(apply(params, state, IMAGES, False)[0], expected.logits, rtol=1e-4, atol=1e-5)


def reach(x):
    return np.abs(x).max() / x.std()


def test_initial_weights_are_drawn_as_transformers_draws_them():
    config = dataclasses.replace(CONFIG, embedding_size=32, hidden_sizes=(32, 64), num_labels=50)
    torch.manual_seed(0)
    theirs = dict(
        transformers.ResNetForImageClassification(transformers.ResNetConfig(**to_hf(config))).named_parameters()
    )
    ours = torch_names(config).to_torch(functional_with_state(ResNet(config, rngs=nnx.Rngs(0)))[1])
    for name, tensor in theirs.items():
        expected = tensor.detach().numpy()
        assert ours[name].std() == pytest.approx(expected.std(), rel=0.1 if expected.size > 1000 else 0.3), name
        if expected.size > 1000:
            # Uniform draws reach √3 standard deviations, normal ones more than 2.5.
            assert (reach(ours[name]) > 2.5) == (reach(expected) > 2.5), name


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_a_convolution_is_padded_as_in_pytorch(kernel, stride, size):
    x = np.random.default_rng(0).standard_normal((2, size, size + 1, 3))
    theirs = torch.nn.Conv2d(3, 4, kernel, stride, padding=kernel // 2, bias=False).double()
    with jax.enable_x64(True):
        apply, _ = functional(conv(3, 4, kernel=kernel, stride=stride, rngs=nnx.Rngs(0)))
        ours = apply({"kernel": jnp.asarray(CONV.to_jax(theirs.weight.detach().numpy()))}, jnp.asarray(x))
    expected = theirs(torch.tensor(x.transpose(0, 3, 1, 2))).detach().numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [5, 6])
def test_pooling_of_equal_and_negative_values_has_pytorchs_values_and_gradients(size):
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 1, (2, size, size + 1, 3)).astype(np.float64)
    theirs = torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    expected = torch.nn.MaxPool2d(3, 2, padding=1)(theirs)
    cotangent = rng.standard_normal(tuple(expected.shape))
    (expected * torch.tensor(cotangent)).sum().backward()
    with jax.enable_x64(True):
        values, pull = jax.vjp(lambda x: max_pool(x, kernel=3, stride=2), jnp.asarray(x))
        (gradient,) = pull(jnp.asarray(cotangent.transpose(0, 2, 3, 1)))
    np.testing.assert_array_equal(values, expected.detach().numpy().transpose(0, 2, 3, 1))
    np.testing.assert_allclose(gradient, theirs.grad.numpy().transpose(0, 2, 3, 1), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_type": "wide"}, "layer_type 'wide'"),
        ({"model_type": "regnet"}, "model_type 'regnet'"),
    ],
)
def test_an_unsupported_configuration_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_hf(to_hf(CONFIG) | change)


def test_images_with_another_number_of_channels_are_refused():
    apply, params, state = functional_with_state(ResNet(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"images must be \[B, H, W, 3\], got shape \[3, 16, 16, 1\]"):
        apply(params, state, IMAGES[..., :1])
