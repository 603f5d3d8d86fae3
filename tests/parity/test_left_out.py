"""Tensors that only PyTorch has, and a tensor that fills two leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain
from jaxtrain.errors import UserError
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from parity import AdamW, Case
from parity.run import examine
from parity.weights import completed, proposed
from parity.weights.tied import tie_leaves, tied_names

WORDS, WIDTH = 7, 4


class Net(torch.nn.Module):
    """Tied embeddings, a norm with running statistics, and a layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.pooler = torch.nn.Linear(WIDTH, WIDTH)
        self.factor = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.register_buffer("shift", torch.ones(2, 3))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))) * self.factor


def loss_fn(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    x = params["embed"][batch["x"]]
    mean, var, n = x.mean(0), x.var(0), len(x)
    after = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var * n / (n - 1)}
    if rng is None:
        mean, var = state["mean"], state["var"]
    out = (x - mean[None]) / jnp.sqrt(var + 1e-5)[None] * params["scale"][None] + params["bias"][None]
    return jaxtrain.Loss((jnp.sin(0.5 * out @ params["head"]) * batch["y"]).sum(), n), {}, after


def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(WORDS, size=rows), "y": rng.standard_normal((rows, WORDS), np.float32)}


ROW = jax.ShapeDtypeStruct((WIDTH,), np.float32)
CASE = Case(
    name="left-out",
    torch_model=Net,
    torch_loss=lambda model, batch: ((model(batch["x"]).sin() * batch["y"]).sum(), len(batch["x"])),
    loss_fn=loss_fn,
    params_like={
        "embed": jax.ShapeDtypeStruct((WORDS, WIDTH), np.float32),
        "head": jax.ShapeDtypeStruct((WIDTH, WORDS), np.float32),
        "scale": ROW,
        "bias": ROW,
    },
    names=NameTable(
        {
            "embed": TorchParam("embed.weight"),
            "head": TorchParam("head.weight", LINEAR),
            "scale": TorchParam("norm.weight"),
            "bias": TorchParam("norm.bias"),
        }
    ),
    batch=batch,
    rows=6,
    optimizer=AdamW(lr=1e-2, weight_decay=0.1),
    clip_norm=0.5,
    state_like={"mean": ROW, "var": ROW},
)


def test_tied_leaves_are_one_parameter_and_what_pytorch_alone_has_is_left_out_and_noted() -> None:
    examination = examine(CASE, steps=3)
    assert examination.verdict.passed, examination.verdict.faults
    assert examination.notes == (
        "factor is left out: it is frozen in PyTorch and has no leaf",
        "pooler.bias is left out: PyTorch's loss does not depend on it",
        "pooler.weight is left out: PyTorch's loss does not depend on it",
        "shift is left out: PyTorch's loss does not change it, and it has no leaf",
        "head and embed are one tensor of PyTorch: trained as one leaf",
    )
    complete, _ = completed(CASE)
    assert complete.buffer_names == ("norm.running_mean", "norm.running_var")
    head_first = NameTable({path: CASE.names.params[path] for path in ("head", "embed")})
    aliased = dataclasses.replace(CASE, names=head_first)
    # Of two leaves the first is kept, under the tensor's own name.
    assert tie_leaves(aliased, tied_names(Net()))[0].names == NameTable(
        {"head": TorchParam("embed.weight", LINEAR)}, {"head.weight": "embed.weight"}
    )
    # The gradient of the shared tensor is the sum of those of the two leaves.
    params = {name: np.full(x.shape, 0.1 + i, np.float32) for i, (name, x) in enumerate(CASE.params_like.items())}
    params["head"] = params["embed"].T
    state = jax.tree.map(lambda x: jnp.ones(x.shape), CASE.state_like)
    apart, shared = (
        jax.grad(lambda p, case=case: case.loss_fn(p, batch(0, 6), None, state)[0].total)(p)
        for case, p in ((CASE, params), (complete, {k: v for k, v in params.items() if k != "head"} | {"head": None}))
    )
    np.testing.assert_allclose(shared["embed"], apart["embed"] + apart["head"].T, rtol=1e-5)


def test_leaves_of_a_tied_tensor_are_matched_without_names() -> None:
    examination = examine(dataclasses.replace(CASE, names=None), steps=3)
    assert examination.verdict.passed, examination.verdict.faults
    assert examination.notes == examine(CASE, steps=1).notes
    names, _ = proposed(dataclasses.replace(CASE, names=None))
    assert {path: (param.name, param.layout) for path, param in names.names.params.items()} == {
        path: (param.name, param.layout) for path, param in CASE.names.params.items()
    }


class Twice(torch.nn.Module):
    """A table with three names, two of them of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.nn.Embedding(WORDS, WIDTH)
        self.target = self.source
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.source.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.source(x) + self.target(x + 1).sin())


def twice(factor: float = 1.0) -> Case:
    """JAX has a table of its own for the sources."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        first, second = params["first"], params["second"]
        h = first[batch["x"]] + factor * jnp.sin(second[batch["x"] + 1])
        return jaxtrain.Loss((jnp.sin(h @ second.T) * batch["y"]).sum(), len(batch["x"])), {}

    def lower(seed: int, rows: int) -> dict[str, np.ndarray]:
        return {**batch(seed, rows), "x": batch(seed, rows)["x"] % (WORDS - 1)}

    like = {name: jax.ShapeDtypeStruct((WORDS, WIDTH), np.float32) for name in ("first", "second")}
    case = dataclasses.replace(CASE, loss_fn=loss_fn, torch_model=Twice, batch=lower)
    return dataclasses.replace(case, params_like=like, names=None, state_like=None)


def test_which_names_of_a_tied_tensor_a_leaf_has_is_decided_by_the_losses_or_refused() -> None:
    complete, notes = proposed(twice())
    assert notes == ()
    assert {path: param.name for path, param in complete.names.params.items()} == {
        "first": "source.weight",
        "second": "target.weight",
    }
    assert complete.names.tied == {"head.weight": "target.weight"}
    with pytest.raises(UserError, match=r"of the tied source.weight, target.weight, head.weight is in doubt"):
        proposed(twice(1.001))


def test_a_buffer_that_the_table_does_not_list_is_left_out() -> None:
    buffers = NameTable({"mean": TorchParam("norm.running_mean"), "var": TorchParam("norm.running_var")})
    given, _ = completed(dataclasses.replace(CASE, buffers=buffers))
    assert given.buffer_names == completed(CASE)[0].buffer_names
