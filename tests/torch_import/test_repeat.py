"""Repeated layers as a loop over stacked parameters, beside the same layers unrolled."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain.torch_import import Graph, ImportedModel
from jaxtrain.torch_import.graph import REPEAT
from tests.torch_import.reference import batch_of, weighted

WIDTH = 4


class Layer(nn.Module):
    """A layer that reads what enters the first layer, and has state."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x))
        gated = hidden * torch.sigmoid(1.7 * hidden)
        return nn.functional.dropout(gated, 0.3, self.training) * self.scale + first


class Network(nn.Module):
    """Layers of several kinds, of which all results are used afterwards."""

    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], x) * 1.5)
        return hidden[-1], hidden[1].mean(), hidden[-2].sum()


def network(*scales: float, frozen: int = 0) -> nn.Module:
    torch.manual_seed(0)
    module = Network(*scales).double()
    for layer in module.layers[:frozen]:
        layer.requires_grad_(False)
    return module


def run(model: ImportedModel, train: bool) -> Any:
    """Return outputs, gradients and state by PyTorch's names."""
    x = batch_of(3, WIDTH)

    def loss(params: Any) -> Any:
        outputs, state = model(params, x, jax.random.key(0) if train else None, model.state)
        return weighted(outputs, jax.numpy), (outputs, state)

    (_, (outputs, state)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
    assert model.state_names is not None
    return outputs, model.names.to_torch(grads), model.state_names.to_torch(state)


def loops(model: ImportedModel) -> list[int]:
    """Return the lengths of the loops of a model."""
    return [node.kwargs["length"] for node in model.graph.nodes if node.op == REPEAT]


def test_a_loop_over_layers_computes_what_unrolled_layers_compute() -> None:
    with jax.enable_x64():
        module, x = network(*[1.0] * 3), batch_of(3, WIDTH)
        model, unrolled = jt.from_torch(module, x), jt.from_torch(module, x, unroll=True)
        assert loops(model) == [3]
        assert loops(unrolled) == []
        assert {*model.params} == {
            f"layers.*.{x}" for x in ("linear.weight", "linear.bias", "norm.weight", "norm.bias")
        }
        assert model.params["layers.*.linear.weight"].shape == (3, WIDTH, WIDTH)
        own = [name for name, _ in module.named_parameters()]
        assert model.names.torch_order(model.params) == unrolled.names.torch_order(unrolled.params) == own
        assert Graph.from_json(model.graph.to_json()) == model.graph
        for train in (True, False):
            for ours, theirs in zip(run(model, train), run(unrolled, train), strict=True):
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), ours, theirs)


class Alternating(nn.Module):
    """Layers of which every second one differs for longer sequences, as those with a sliding window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            hidden = layer(x)
            x = x + (hidden.cumsum(0) if i % 2 and len(x) > 3 else hidden)
        return x


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3)])
def test_layers_that_repeat_otherwise_for_another_shape_are_a_loop(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, (example, x) = Alternating().double(), (batch_of(n, WIDTH) for n in lengths)
    with jax.enable_x64():
        model, unrolled = jt.from_torch(module, example), jt.from_torch(module, example, unroll=True)
        ours, theirs = (
            m.names.to_torch(jax.jit(jax.grad(lambda p, m=m: weighted(m(p, x)[:1], jax.numpy)))(m.params))
            for m in (model, unrolled)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), ours, theirs)
        nodes = model._capture(model.params, x, train=False).graph.nodes
    assert [node.kwargs["length"] for node in nodes if node.op == REPEAT] == [2 if lengths[0] == 3 else 4]


@pytest.mark.parametrize(
    ("scales", "frozen", "lengths", "name"),
    [
        ([1, 2, 2, 2], 0, [3], "layers.1:4.linear.bias"),
        ([1, 2, 1, 2, 1], 0, [2], "layers.1:4:2.linear.bias"),
        ([1, 1, 2, 1, 1, 2, 1, 1], 0, [2, 2], "layers.6:8.linear.bias"),
        ([1, 1, 1, 1], 2, [2, 2], "layers.0:2.linear.bias"),
        ([1, 2, 3], 0, [], "layers.0.linear.bias"),
    ],
)
def test_layers_that_differ_are_in_different_loops(
    scales: list[int], frozen: int, lengths: list[int], name: str
) -> None:
    module = network(*scales, frozen=frozen).float()
    model = jt.from_torch(module, batch_of(3, WIDTH).astype(np.float32))
    assert loops(model) == lengths
    assert name in model.params
    assert model.names.torch_order(model.params) == [name for name, _ in module.named_parameters()]
    assert model.frozen(name) == (frozen > 0)
