"""The captured graph as a file, and what its nodes carry."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from jaxtrain.torch_import.graph import Graph
from jaxtrain.torch_import.interpret import interpret


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = self.fc(self.norm(x))
        return {"hidden": (hidden.masked_fill(x > 0, -math.inf), hidden.to(torch.bfloat16)), "nothing": None, "k": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return from_torch(nn.Sequential(Block()), np.ones((2, 4), np.float32))


def test_a_graph_survives_its_file_and_runs_from_it(model) -> None:
    captured = next(iter(model._captured.values()))
    read = Graph.from_json(captured.graph.to_json())
    assert read == captured.graph
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4)), np.float32)
    outputs, _ = interpret(read, params=model.params, state={}, constants={}, inputs=[x], rng=None, ops={})
    for ours, again in zip(jax.tree.leaves(model(model.params, x)[0]), jax.tree.leaves(outputs), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(again))
    assert outputs["nothing"] is None
    assert outputs["hidden"][1].dtype == jnp.bfloat16


def test_a_node_knows_its_module_and_its_line(model) -> None:
    captured = next(iter(model._captured.values()))
    nodes = {node.op: node for node in captured.graph.nodes}
    assert nodes["aten.linear.default"].module == "0.fc"
    assert "test_graph.py:" in nodes["aten.linear.default"].source
    assert "self.fc(self.norm(x))" in nodes["aten.layer_norm.default"].source


def test_other_shapes_and_dtypes_capture_the_module_again(model) -> None:
    hidden = model(model.params, np.ones((5, 4), np.float32))[0]["hidden"][1]
    assert hidden.shape == (5, 4)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    assert model(low, jnp.ones((2, 4), jnp.bfloat16))[0]["hidden"][0].dtype == jnp.bfloat16


def test_parameters_do_not_share_the_memory_of_the_module() -> None:
    module = nn.Linear(64, 64)
    model = from_torch(module, np.ones((1, 64), np.float32))
    before = np.array(model.params["weight"])
    with torch.no_grad():
        module.weight.zero_()
    np.testing.assert_array_equal(np.asarray(model.params["weight"]), before)


def test_a_module_on_the_meta_device_has_shapes_for_parameters() -> None:
    x = np.ones((1, 3), np.float32)
    with torch.device("meta"):
        module = nn.Linear(3, 2)
        normalized = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    model = from_torch(module, x)
    assert model.params["weight"] == jax.ShapeDtypeStruct((2, 3), np.float32)
    outputs, _ = jax.eval_shape(lambda params: model(params, x), model.params)
    assert outputs.shape == (1, 2)
    without_values = from_torch(normalized, np.ones((2, 3), np.float32))
    with pytest.raises(UserError, match=r"the buffer '1\.running_mean' is on PyTorch's meta device, without values"):
        jax.eval_shape(lambda params: without_values(params, x), without_values.params)


def test_a_batch_without_an_input_is_named() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    x = np.ones(2, np.float32)
    model = from_torch(Two(), {"a": x, "b": x})
    assert model({}, {"a": x, "b": x, "label": x})[0].tolist() == [2.0, 2.0]
    with pytest.raises(UserError, match="the batch has no 'b'"):
        model({}, {"a": x})


def test_a_function_for_an_operation_of_ones_own() -> None:
    class Bessel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    x = np.arange(3, dtype=np.float32)
    with pytest.raises(UserError, match="special_bessel_j0"):
        from_torch(Bessel(), x)
    model = from_torch(Bessel(), x, ops={"aten.special_bessel_j0.default": jnp.square})
    assert model({}, x)[0].tolist() == [0.0, 1.0, 4.0]
