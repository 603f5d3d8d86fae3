"""Convolutions and what is computed from them have the channels on the last axis."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain.torch_import.graph import REPEAT
from jaxtrain.torch_import.rewrites.channels_last import PERMUTE
from tests.torch_import.reference import batch_of, weighted


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return x + torch.relu(self.norm(x))


class Convolution(nn.Module):
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
        self.convolutions = nn.Sequential(Convolution(), Convolution())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(1, 6, 1, 1))

    def forward(self, x):
        x = nn.functional.max_pool2d(self.stem(x), 3, 2, 1) * self.scale
        x = self.convolutions(self.layers(x))
        y = nn.functional.avg_pool2d(x.flip(1), 3, 1, 1)
        y = self.up(torch.cat([x, y], 1))
        return nn.functional.adaptive_avg_pool2d(y, 2), x.amax((2, 3))


def test_values_and_gradients_are_pytorchs_and_layers_are_not_transposed():
    torch.manual_seed(0)
    module, x = Network().double(), batch_of(2, 3, 10, 8)
    with jax.enable_x64():
        model = jt.from_torch(module, x)

        def total(params):
            outputs, state = model(params, x, jax.random.key(0), model.state)
            return weighted(outputs, jnp), state

        (value, state), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model.params)
        grads, state = model.names.to_torch(grads), model.state_names.to_torch(state)
        evaluated, _ = model(model.params, x, state={**model.state})
        nodes = model.graph.nodes
    expected = copy.deepcopy(module).eval()(torch.tensor(x))
    for ours, theirs in zip(evaluated, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-12, atol=1e-13)
    loss = weighted(module(torch.tensor(x)), torch)
    loss.backward()
    np.testing.assert_allclose(value, loss.detach(), rtol=1e-12)
    largest = max(param.grad.abs().max() for param in module.parameters())
    for name, param in module.named_parameters():
        np.testing.assert_allclose(grads[name], param.grad, atol=1e-12 * largest)
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(state[name], buffer, rtol=1e-12)
    (loop,) = (node for node in nodes if node.op == REPEAT)
    assert PERMUTE not in {node.op for node in loop.kwargs["body"].nodes}
    # Of the image, the scale, the flipped array and its result, and the two outputs.
    assert sum(node.op == PERMUTE for node in nodes) == 6
