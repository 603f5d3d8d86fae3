"""Conditions of values whose two paths have the same results are both in the graph.

The law is tested over generated chains of blocks with a condition each: for every combination of answers, outputs,
gradients and buffers are PyTorch's, in one compiled program.
"""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.graph import COND
from tests.torch_import.reference import weighted

DEPENDS = "a gradient depends on a condition"
pytestmark = pytest.mark.filterwarnings(f"ignore:.*{DEPENDS}")

Tensor = torch.Tensor
ROWS, WIDTH = 4, 3
BLOCKS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {}
"""Functions of a part, x [4, 3] and t [4], whose condition holds for the sum of t above 0 and not below."""


def block(function: Any) -> Any:
    BLOCKS[function.__name__] = function
    return function


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor([0.5, 1.0, 1.5])), nn.Parameter(torch.ones(WIDTH) / 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))


@block
def of_formulas(part: Any, x: Tensor, t: Tensor) -> Tensor:
    if t.sum() > 0:
        return (x * part.scale).exp()
    return (x + part.bias).sin()


@block
def of_a_gradient_that_is_not_finite(part: Any, x: Tensor, t: Tensor) -> Tensor:
    y = x * 0 + t.sum() * part.scale
    if (y > 0).all():
        y = y.log()
    return y * part.bias + x


@block
def of_an_item(part: Any, x: Tensor, t: Tensor) -> Tensor:
    is_positive = (t.sum() > 0).any().item()
    return x * part.scale if is_positive else x - part.bias


@block
def nested(part: Any, x: Tensor, t: Tensor) -> Tensor:
    if t.sum() > 0:
        if t.sum() > 100:
            return x * 3 + part.scale
        x = x * part.scale
    elif t.max() < -100:
        return x - part.bias
    return x.tanh()


@block
def of_a_buffer(part: Any, x: Tensor, t: Tensor) -> Tensor:
    if t.sum() > 0:
        part.count += 1
        part.mean.copy_(x.detach().mean(0))
    return x * part.scale - part.mean + part.count


@block
def of_integers(part: Any, x: Tensor, t: Tensor) -> Tensor:
    places = x.argmax(1) if t.sum() > 0 else x.argmin(1)
    return x * part.scale + x.gather(1, places[:, None]) * torch.nn.functional.one_hot(places, WIDTH)


@block
def of_constants(part: Any, x: Tensor, t: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0]) if t.sum() > 0 else torch.tensor([3.0, 2.0, 1.0])
    return x * weights.to(x) * part.scale


class Chain(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.parts = names, nn.ModuleList(Part() for _ in names)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        for name, part, given in zip(self.names, self.parts, t, strict=True):
            x = BLOCKS[name](part, torch.tanh(x), given)
        return x, x.argmax(1)


def batch_of(signs: tuple[int, ...]) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    return {"x": x, "t": np.array(signs)[:, None] * np.linspace(0.5, 1.5, ROWS)}


@pytest.mark.parametrize("names", [sorted(BLOCKS)[i : i + 2] for i in range(0, len(BLOCKS), 2)], ids="-".join)
def test_every_combination_of_answers_is_pytorchs(names: list[str]) -> None:
    with jax.enable_x64():
        module = Chain(names).double()
        model = from_torch(module, batch_of((1,) * len(names)))
        if "nested" not in names:
            assert model.assumptions == ()

        @jax.jit
        def compiled(params: Any, batch: Any, state: Any) -> Any:
            def loss(params: Any) -> Any:
                outputs, new = model(params, batch, jax.random.key(0), state)
                return weighted(outputs[:1], jnp), (outputs, new)

            return jax.value_and_grad(loss, has_aux=True)(params)

        for signs in itertools.product((1, -1), repeat=len(names)):
            batch = batch_of(signs)
            state = model.state
            (_, (outputs, new)), grads = compiled(model.params, batch, state)
            own = model.to_torch().double().train()
            expected = own(**{name: torch.tensor(x) for name, x in batch.items()})
            weighted(expected[:1], torch).backward()
            eager = model(model.params, batch, jax.random.key(0), state)[0]
            for ours, again, theirs in zip(outputs, eager, expected, strict=True):
                np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-12, err_msg=str(signs))
                np.testing.assert_allclose(again, theirs.detach(), rtol=1e-12, err_msg=str(signs))
            for name, grad in model.names.to_torch(grads).items():
                theirs = own.get_parameter(name).grad
                theirs = np.zeros(grad.shape) if theirs is None else theirs
                np.testing.assert_allclose(grad, theirs, rtol=1e-10, atol=1e-13, err_msg=f"{signs} {name}")
            if model.state_names is not None:
                for name, x in model.state_names.to_torch(new).items():
                    np.testing.assert_allclose(x, own.get_buffer(name), rtol=1e-12, err_msg=f"{signs} {name}")


class Of(nn.Module):
    """A function as a module with a layer."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def x_of(sign: float = 1.0) -> np.ndarray:
    return (sign * np.linspace(0.5, 2, ROWS * WIDTH).reshape(ROWS, WIDTH)).astype(np.float32)


def four(self: Any, x: Tensor) -> Tensor:
    for bound in (0.1, 0.2, 0.3, 0.4):
        x = self.linear(x) if x.sum() > bound else x - 1
    return x


def checked(self: Any, x: Tensor) -> Tensor:
    if x.sum() < 0:
        raise ValueError("negative")
    return self.linear(x)


ASSUMED: dict[str, Callable[[Any, Tensor], Any]] = {
    "other shapes": lambda self, x: self.linear(x) if x.sum() > 0 else self.linear(x)[:2],
    "another dtype": lambda self, x: (self.linear(x), x if x.sum() > 0 else x > 0),
    "another structure": lambda self, x: self.linear(x) if x.sum() > 0 else (x, x),
    "an error": checked,
}


@pytest.mark.parametrize("name", ASSUMED)
def test_paths_with_other_results_are_assumptions(name: str) -> None:
    model = from_torch(Of(ASSUMED[name]), x_of())
    assert len(model.assumptions) == 1
    assert all(node.op != COND for node in model.graph.nodes)
    with pytest.raises(UserError, match=r"forward reads .* \(test_branches.py:\d+"):
        model(model.params, x_of(-1))


def test_of_many_conditions_the_first_are_branches_and_the_others_assumptions() -> None:
    model = from_torch(Of(four), np.full((ROWS, WIDTH), 9, np.float32))
    assert any(node.op == COND for node in model.graph.nodes)
    assert 1 <= len(model.assumptions) <= 8


def test_a_condition_of_random_numbers_is_drawn_in_every_call() -> None:
    model = from_torch(Of(lambda self, x: self.linear(x) if torch.rand(()) < 0.5 else x * 2.0), x_of())
    run = jax.jit(lambda rng: model(model.params, x_of(), rng)[0])
    found = [bool(np.allclose(run(jax.random.key(i)), 2 * x_of())) for i in range(16)]
    assert 2 < sum(found) < 14


def both(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if x.sum() > 0 else self.linear(x.flip(1)) * 2


def first(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return y if x.sum() > 0 else x - 1


def inner(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + (self.linear(x) if x.max() > 1 else x.sin())
    return self.linear(x).cos()


def bias(self: Any, x: Tensor) -> Tensor:
    y = x @ self.linear.weight
    return y + self.linear.bias if x.sum() > 0 else y + self.linear.bias.detach()


def detached(self: Any, x: Tensor) -> Tensor:
    return x * self.linear.weight if x.sum() > 0 else x * self.linear.weight + self.linear(x).detach()


@pytest.mark.parametrize(
    ("function", "some"),
    [
        (both, set()),
        (first, {"linear.weight", "linear.bias"}),
        (inner, {"linear.weight", "linear.bias"}),
        (bias, {"linear.bias"}),
        (detached, set()),
    ],
)
def test_parameters_with_a_gradient_on_some_paths_alone_are_warned_of(function: Any, some: set[str]) -> None:
    module = Of(function)
    module.linear.weight.data = module.linear.weight.data[:3, :3]
    x = np.linspace(0.5, 2, WIDTH * WIDTH).reshape(WIDTH, WIDTH).astype(np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_torch(module, x)
    found = [str(x.message) for x in caught if DEPENDS in str(x.message)]
    assert len(found) == (1 if some else 0)
    # PyTorch has None of these alone, on some of the paths.
    own = set()
    for batch in (x, x * 0.4, -x):
        module.zero_grad()
        module(torch.tensor(batch, requires_grad=True)).sum().backward()
        own |= {name for name, p in module.named_parameters() if p.grad is None and not model.frozen(name)}
    assert own == some
    for text in found:
        assert ("and 1 more" in text) == (len(some) == 2)
        assert min(some) in text
        assert "test_branches.py:" in text


def test_a_module_that_is_initialized_by_its_first_batch() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(WIDTH))
            self.register_buffer("start", torch.zeros(WIDTH))
            self.register_buffer("is_started", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.is_started == 0:
                self.start.copy_(x.detach().mean(0))
                self.is_started.fill_(1)
            return x - self.start + self.shift

    module = Norm()
    model = from_torch(module, x_of())
    state = model.state
    for batch in (x_of(), x_of(3.0)):
        outputs, state = model(model.params, batch, jax.random.key(0), state)
        np.testing.assert_allclose(outputs, module(torch.tensor(batch)).detach(), rtol=1e-6)
    assert int(state["is_started"]) == 1


def test_a_path_may_read_one_result_of_an_operation_with_several_before_the_condition() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            y = self.norm(x)
            return self.head(y if float(t.sum()) > 0 else x)

    with jax.enable_x64():
        module = Chosen().double().eval()
        model = from_torch(module, batch_of((1,)))
        for sign in (1, -1):
            batch = batch_of((sign,))
            expected = module(*map(torch.tensor, batch.values())).detach().numpy()
            np.testing.assert_allclose(model(model.params, batch)[0], expected, rtol=1e-12)


def test_a_saved_model_has_both_paths(tmp_path: Path) -> None:
    model = from_torch(Of(lambda self, x: self.linear(x) if x.sum() > 0 else x * 2.0), x_of())
    model.save(tmp_path / "saved")
    saved = load_imported(tmp_path / "saved")
    for sign in (1.0, -1.0):
        np.testing.assert_array_equal(saved(saved.params, x_of(sign))[0], model(model.params, x_of(sign))[0])
    with pytest.raises(UserError, match=r"source of a condition.*test_branches.py:\d+"):
        model.source()
