"""Values with the same elements in another order are located where the order changes."""

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxtrain
from jaxtrain import optim
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Case
from parity.compare.fingerprint import TOLERANCE, Trace, counterparts
from parity.compare.order import comparable, order, same_order
from parity.explain.locate import locate
from parity.explain.reordered import in_order
from parity.optimizer import Optimizer

X = np.random.default_rng(0).standard_normal((2, 6, 4, 5))
BATCH, LENGTH, HEADS, WIDTH = 2, 6, 4, 5


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (X.transpose(0, 2, 1, 3), X),
        (X.reshape(2, 6, 20), X),
        (X.reshape(12, 20), X.transpose(2, 3, 0, 1)),
        (X[0, :4, :, :4].transpose(2, 0, 1), X[0, :4, :, :4]),  # channels first, as long as the image
        (X[0], np.broadcast_to(X[0], (4, 6, 4, 5))),
        (X[0, :4, 0], np.broadcast_to(X[0, :4, 0, :, None], (4, 5, 4))),
    ],
)
def test_layouts_have_one_order(theirs: np.ndarray, ours: np.ndarray) -> None:
    assert same_order(order(theirs), order(ours), 1e-12)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (X, X[:, ::-1]),
        (X.reshape(2, 6, 20), X.swapaxes(2, 3).reshape(2, 6, 20)),
        (np.repeat(X, 2, 2), np.tile(X, (1, 1, 2, 1))),
        (X[0, :4, :, 0], X[0, :4, :, 0].T),
        (X.reshape(2, 24, 5), X.swapaxes(1, 2).reshape(2, 24, 5)),
    ],
)
def test_permutations_have_different_orders(theirs: np.ndarray, ours: np.ndarray) -> None:
    assert not same_order(order(theirs), order(ours), 1e-6)
    assert comparable(order(theirs), order(ours))


@pytest.mark.parametrize("heads", [2, 4, 5, 10])
def test_a_value_whose_last_axis_is_split_and_whose_axes_are_then_exchanged_is_the_same(heads: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 20))
    split = x.reshape(3, 7, heads, -1)
    for axes in permutations(range(4)):
        trace: Trace[str] = Trace()
        value = trace.add(x, trace.add_input(X), "x")
        assert trace.add(split, value, "split") == trace.add(split.transpose(axes), value, "exchanged") == value
        assert trace.add(split.transpose(axes)[::-1], value, "reversed") != value


def test_the_order_of_a_permuted_parameter_is_not_held_against_the_values_computed_from_it() -> None:
    w, x = X[0, 0], X[0, :, 0]
    ours: Trace[str] = Trace()
    theirs: Trace[str] = Trace()
    for trace, weight, name in ((theirs, w, "linear"), (ours, w[::-1], "permuted")):
        given = trace.add(x, trace.add_input(x + 0), "x")
        trace.add(x @ weight.T, given | trace.add_input(weight), name)
        trace.add(x[:: 1 if trace is theirs else -1] ** 2, given, "square")
    same = {i: equal for i, equal in enumerate(counterparts(theirs, ours)) if equal}
    assert sorted(same) == [0, 1, 2, 3]
    assert sorted(in_order(theirs, ours, same, TOLERANCE, TOLERANCE)) == [0, 1, 2]


class Attention(torch.nn.Module):
    """Attention without projections, with biases of the distance, of its magnitude and of that to the past, and a loss
    of the parameters of two layers, which JAX stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.near = torch.nn.Parameter(torch.randn(2 * LENGTH))
        self.far = torch.nn.Parameter(torch.randn(2 * LENGTH))
        self.past = torch.nn.Parameter(torch.randn(2 * LENGTH))
        self.scales = torch.nn.ParameterList([torch.rand(HEADS * WIDTH) + 0.5 for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(LENGTH)
        distance = at[None] - at[:, None]
        bias = self.near[distance + LENGTH] + self.far[distance.abs()] + self.past[distance.clamp(max=0).neg()]
        scores = torch.einsum("bqhd,bkhd->bhqk", x, x) + bias
        merged = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), x).flatten(-2)
        penalty = sum(scale.square().sum() for scale in self.scales)
        return (merged * self.scales[0] * self.scales[1]).sin().sum() + penalty


def attention(bug: str = "") -> Case:
    """The same in JAX, with a bug."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        x, at = batch["x"], jnp.arange(LENGTH)
        with jax.numpy_rank_promotion("allow"):
            distance = at[:, None] - at[None] if bug == "sign" else at[None] - at[:, None]  # sign
            past = jnp.abs(distance) if bug == "distance" else -jnp.minimum(distance, 0)  # distance
            bias = params["near"][distance + LENGTH] + params["far"][jnp.abs(distance)] + params["past"][past]
            scores = jnp.einsum("bqhd,bkhd->bhqk", x, x) + bias
            heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), x)
            merged = (heads.swapaxes(2, 3) if bug == "heads" else heads).reshape(BATCH, LENGTH, -1)  # heads
            first, second = params["scales"]
            penalty = jnp.square(params["scales"]).sum()
            return jaxtrain.Loss(jnp.sin(merged * first * second).sum() + penalty, weight=BATCH), {}

    shapes = {"near": (2 * LENGTH,), "far": (2 * LENGTH,), "past": (2 * LENGTH,), "scales": (2, HEADS * WIDTH)}
    return Case(
        name="attention",
        torch_model=Attention,
        torch_loss=lambda model, batch: (model(batch["x"]), BATCH),
        loss_fn=loss_fn,
        params_like={name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()},
        names=NameTable({name: TorchParam("scales.{layer}" if name == "scales" else name) for name in shapes}),
        batch=lambda seed, rows: {
            "x": np.random.default_rng(seed).standard_normal((rows, LENGTH, HEADS, WIDTH), np.float32)
        },
        rows=BATCH,
        optimizer=Optimizer("SGD", partial(torch.optim.SGD, lr=0.1), optim.sgd(0.1)),
        clip_norm=None,
    )


@pytest.mark.parametrize("bug", ["heads", "sign", "distance"])
def test_a_reordered_value_is_located_on_its_line(bug: str) -> None:
    found = locate(attention(bug))
    assert found is not None
    lines = Path(__file__).read_text().splitlines()
    (line,) = (line for line in lines if line.endswith(f"# {bug}"))
    assert found.jax_source.endswith(line.strip())


def test_nothing_is_located_without_a_bug() -> None:
    assert locate(attention()) is None
