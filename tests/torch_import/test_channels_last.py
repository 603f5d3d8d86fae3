"""Convolutions and what is computed from them have the channels on the last axis."""

import jax
import numpy as np
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain.torch_import.channels_last import PERMUTE
from jaxtrain.torch_import.graph import REPEAT


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Network(nn.Module):
    """Every operation that takes the new layout, and one, the flip, that does not."""

    def __init__(self):
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.ConvTranspose2d(12, 2, 2, stride=2)
        self.layers = nn.Sequential(Layer(), Layer())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(1, 6, 1, 1))

    def forward(self, x):
        x = nn.functional.max_pool2d(self.stem(x), 3, 2, 1) * self.scale
        x = self.layers(x)
        y = nn.functional.avg_pool2d(x.flip(1), 3, 1, 1)
        y = self.up(torch.cat([x, y], 1))
        return nn.functional.adaptive_avg_pool2d(y, 2), x.amax((2, 3))


def test_values_and_gradients_are_pytorchs_and_layers_are_not_transposed():
    torch.manual_seed(0)
    module = Network().double()
    x = np.random.default_rng(0).normal(size=(2, 3, 10, 8))
    with jax.enable_x64(True):
        model = jt.from_torch(module, x)

        def total(params):
            (y, z), state = model(params, x, jax.random.key(0), model.state)
            return (y**3).sum() + (z**2).sum(), state

        (value, state), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model.params)
        expected = module(torch.tensor(x))
        loss = (expected[0] ** 3).sum() + (expected[1] ** 2).sum()
        loss.backward()
        np.testing.assert_allclose(value, loss.detach(), rtol=1e-12)
        for name, grad in model.names.to_torch(grads).items():
            np.testing.assert_allclose(grad, module.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
        for name, buffer in model.state_names.to_torch(state).items():
            np.testing.assert_allclose(buffer, module.get_buffer(name), rtol=1e-12)
        evaluated, _ = model(model.params, x, state=state)
        np.testing.assert_allclose(evaluated[0], module.eval()(torch.tensor(x))[0].detach(), rtol=1e-12)
    (loop,) = (node for node in model.graph.nodes if node.op == REPEAT)
    assert PERMUTE not in {node.op for node in loop.kwargs["body"].nodes}
    # Of the image, the scale, the flipped array and its result, and the two outputs.
    assert sum(node.op == PERMUTE for node in model.graph.nodes) == 6
