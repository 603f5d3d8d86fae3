"""Imported modules under autocast: explicit conversions to float32 and regions without autocast, beside PyTorch's."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain.torch_import.graph import REPEAT, Graph
from tests.torch_import.reference import Function, batch_of


class Layer(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.low, self.exact, self.device = nn.Linear(4, 4), nn.Linear(4, 4), device

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = self.low(x)
        with torch.autocast(self.device, enabled=False):
            exact = self.exact(low.float())
            exact += low.float() @ self.exact.weight
        converted = low.float() * low.float() + low.type_as(x) * low.to(torch.float32)
        return x + exact, low * low, converted, torch.softmax(low, -1, dtype=torch.float32), exact


class Net(nn.Module):
    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, devices))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers:
            x, *others = layer(x)
        return x, *others


def net(*devices: str) -> Net:
    torch.manual_seed(0)
    return Net(devices)


def test_conversions_and_regions_have_pytorchs_dtypes_and_values() -> None:
    x, theirs = batch_of(3, 4).astype(np.float32), net("cpu", "cpu", "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(torch.from_numpy(x))
    model = jt.from_torch(net("cuda", "cuda", "cpu"), x)
    assert REPEAT in [node.op for node in model.graph.nodes]
    assert Graph.from_json(model.graph.to_json()) == model.graph

    def run(params: Any) -> Any:
        return model(params, x, jax.random.key(0))[0]

    ours, plain = jax.jit(lambda params: (jt.autocast(run, jnp.bfloat16, "cpu")(params), run(params)))(model.params)
    assert [y.dtype.name for y in ours] == [str(y.dtype).removeprefix("torch.") for y in expected]
    for our, their in zip((*ours, *plain), (*expected, *theirs(torch.from_numpy(x))), strict=True):
        np.testing.assert_allclose(our.astype(np.float32), their.detach().float().numpy(), rtol=1e-5, atol=1e-6)


def test_a_conversion_that_is_changed_in_place_is_the_converted_value_in_float32() -> None:
    def changed(module: Any, x: torch.Tensor) -> torch.Tensor:
        low = x @ x.T
        low.float()[0].mul_(2)
        return low + low.float()

    x = batch_of(3, 3).astype(np.float32)
    ours = jt.from_torch(module := Function(changed).float(), x)({"w": np.ones(3, np.float32)}, x)[0]
    np.testing.assert_allclose(ours, module(torch.from_numpy(x)).detach(), rtol=1e-6)


def test_source_has_them_as_well() -> None:
    x = np.ones((3, 4), np.float32)
    model = jt.from_torch(net("cpu"), x)
    namespace: dict[str, Any] = {}
    exec(source := model.source(), namespace)
    assert source.count("without_autocast(") == 2
    shapes = [
        jax.eval_shape(jt.autocast(lambda params, fn=fn: fn(params, x)[0], jnp.bfloat16), params)
        for fn, params in ((model, model.params), (namespace["model"], model.names.to_torch(model.params)))
    ]
    assert shapes[0] == shapes[1]
