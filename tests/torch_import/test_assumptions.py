"""Values that forward reads as Python numbers and conditions are those of the example, and checked for every batch.

The law is tested over generated modules: each is a chain of blocks, of which each asks for values of its own input. On
other batches for which the answers are the same, outputs and gradients are PyTorch's. Where one answer is another one,
a call outside jit names the line of that block, and inside jit every output and gradient is NaN.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.nn import functional as F

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.capture.eager import untraced
from parity import check
from tests.torch_import.reference import weighted

Tensor = torch.Tensor
ROWS, WIDTH = 4, 6


class Block(NamedTuple):
    """A function of x [4, 6] and of integers [4], with integers of the example, others that ask the same, and others
    that do not."""

    function: Callable[[Tensor, Tensor], Tensor]
    example: list[int]
    same: list[int]
    other: list[int]


BLOCKS: dict[str, Block] = {}


def block(example: list[int], same: list[int], other: list[int]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        BLOCKS[function.__name__] = Block(function, example, same, other)
        return function

    return add


@block([1, 2, 3, 4], [7, 1, 1, 2], [1, 0, 3, 4])
def asserted(x: Tensor, n: Tensor) -> Tensor:
    assert (n > 0).all()
    return x * (n > 2).to(x)[:, None]


@block([1, 2, 3, 8], [0, 8, 2, 1], [1, 2, 9, 1])
def bounded(x: Tensor, n: Tensor) -> Tensor:
    if n.max() >= 9:
        raise ValueError("out of range")
    return x + n.to(x)[:, None]


@block([1, 2, 3, 8], [0, 5, 2, 1], [1, 2, 9, 1])
def checked(x: Tensor, n: Tensor) -> Tensor:
    torch._check(n.max().item() < 9)
    return x * n.to(x)[:, None]


@block([1, 2, 3, 8], [0, 5, 2, 1], [1, 2, 9, 1])
def checked_each(x: Tensor, n: Tensor) -> Tensor:
    torch._check_tensor_all_with(ValueError, n < 9)
    return x - n.to(x)[:, None]


@block([3, 2, 3, 8], [3, 3, 3, 3], [1, 2, 3, 1])
def asserted_async(x: Tensor, n: Tensor) -> Tensor:
    torch._assert_async((n > 2).sum() > 1)
    return x.roll(1, 0) * n.to(x)[:, None]


@block([2, 4, 0, 9], [2, 4, 5, 1], [4, 2, 0, 9])
def split(x: Tensor, n: Tensor) -> Tensor:
    return torch.cat([part.cumsum(1) for part in x.split(n[:2].tolist(), dim=1)], 1)


@block([1, 2, 4, 3], [4, 4, 0, 1], [1, 2, 3, 3])
def cut(x: Tensor, n: Tensor) -> Tensor:
    length = int(n.max())
    return torch.cat([x[:, :length].cumsum(1), x[:, length:]], 1)


@block([2, 9, 0, 0], [2, 1, 1, 1], [1, 9, 0, 0])
def cut_by_item(x: Tensor, n: Tensor) -> Tensor:
    length = n[0].item() * 2 + 1
    return torch.cat([x[:, length:].cumsum(1), x[:, :length]], 1)


@block([0, 1, 2, 2], [2, 0, 0, 1], [0, 1, 1, 1])
def one_hot(x: Tensor, n: Tensor) -> Tensor:
    return x + F.one_hot(n).to(x).cumsum(1).sum(1, keepdim=True)


@block([3, 2, 4, 5], [9, 2, 3, 8], [3, 4, 4, 5])
def repeated(x: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(n.min())):
        x = x.sin() + x
    return x


@block([1, 2, 0, 1], [0, 0, 4, 0], [1, 2, 3, 1])
def repeated_rows(x: Tensor, n: Tensor) -> Tensor:
    return x.repeat_interleave(n, 0).cumsum(0) + torch.repeat_interleave(n)[:, None]


@block([2, 3, 1, 1], [2, 3, 7, 0], [3, 2, 1, 1])
def viewed(x: Tensor, n: Tensor) -> Tensor:
    height, width = n[:2].tolist()
    return x.view(ROWS, height, width).transpose(1, 2).flatten(1)


@block([3, 1, 1, 1], [3, 4, 2, 1], [2, 1, 1, 1])
def resized(x: Tensor, n: Tensor) -> Tensor:
    small = F.interpolate(x[None], size=n[0], mode="linear")[0]
    return x + small.sum(1, keepdim=True)


@block([0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0])
def by_condition(x: Tensor, n: Tensor) -> Tensor:
    part = x[:, :2] if n.any() else x
    return x + part.sum(1, keepdim=True)


@block([4, 1, 3, 1], [3, 4, 1, 0], [5, 0, 1, 1])
def by_number(x: Tensor, n: Tensor) -> Tensor:
    largest = n.max().item()
    part = x[:, :4] if largest > 3 and largest % 2 == 0 else x[:, :1]
    return x * part.mean(1, keepdim=True)


@block([2, 3, 3, 3], [3, 2, 3, 4], [1, 2, 3, 3])
def made(x: Tensor, n: Tensor) -> Tensor:
    return x + torch.arange(n.min().item(), dtype=x.dtype).sum()


@block([1, 2, 0, 0], [1, 2, 3, 3], [2, 2, 0, 0])
def written_afterwards(x: Tensor, n: Tensor) -> Tensor:
    count = n.clone()
    part = x[:, : int(count[0])] if bool(count[1] == 2) else x
    count.add_(5)
    return x + part.sum(1, keepdim=True) * count.to(x)[:, None]


@block([2, 1, 0, 1], [2, 1, 5, 0], [1, 1, 0, 1])
def key_of_a_dict(x: Tensor, n: Tensor) -> Tensor:
    functions = {1: torch.sin, 2: torch.cumsum}
    found, other = n[:2].tolist()
    return functions[found](x, 1) + functions[other](x)


@block([2, 1, 0, 1], [2, 1, 5, 0], [3, 1, 0, 1])
def gathered_values(x: Tensor, n: Tensor) -> Tensor:
    weights = torch.tensor([[n[0], n.max() + 1], [0, n[1]]], dtype=x.dtype)
    small = x.narrow(1, n[0], 2)
    return x + (small @ weights).sum(1, keepdim=True) + torch.tensor([x.mean()])


BRANCHES = {"by_condition", "by_number", "written_afterwards"}
"""Blocks whose condition may be a branch of the graph, as one of the first."""


class Chain(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.weights = nn.ParameterList(nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in names)

    def forward(self, x: Tensor, **numbers: Tensor) -> tuple[Tensor, Tensor]:
        for name, weight in zip(self.names, self.weights, strict=True):
            x = BLOCKS[name].function(torch.tanh(x) * weight, numbers[name])
        return x, x.sum()


def batch_of(chosen: dict[str, str], seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch with integers of a kind ("example", "same", "other") for each block."""
    numbers = {name: np.array(getattr(BLOCKS[name], kind)) for name, kind in chosen.items()}
    return {"x": np.random.default_rng(seed).standard_normal((ROWS, WIDTH)), **numbers}


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_with_the_answers_of_the_example_is_pytorchs_and_another_one_is_an_error_by_line(seed: int) -> None:
    names = sorted(BLOCKS)[seed::4]
    with jax.enable_x64():
        torch.manual_seed(0)
        module = Chain(names).double()
        model = from_torch(module, batch_of(dict.fromkeys(names, "example")))

        @jax.jit
        @jax.value_and_grad
        def compiled(params: Any, batch: Any) -> Any:
            return weighted(model(params, batch, jax.random.key(0))[0], jnp)

        batch = batch_of(dict.fromkeys(names, "same"), 1)
        value, grads = compiled(model.params, batch)
        expected = weighted(module(**{name: torch.tensor(x) for name, x in batch.items()}), torch)
        expected.backward()
        np.testing.assert_allclose(value, expected.item(), rtol=1e-12)
        for name, param in module.named_parameters():
            np.testing.assert_allclose(grads[name], param.grad, rtol=1e-9, atol=1e-12, err_msg=name)
        model(model.params, batch)
        for name in names:
            batch = batch_of({**dict.fromkeys(names, "same"), name: "other"})
            value, grads = compiled(model.params, batch)
            if name in BRANCHES and not np.isnan(value):
                expected = weighted(module(**{name: torch.tensor(x) for name, x in batch.items()}), torch)
                np.testing.assert_allclose(value, expected.item(), rtol=1e-12, err_msg=name)
                continue
            assert np.isnan(value), name
            assert all(np.isnan(x).all() for x in grads.values()), name
            with pytest.raises(UserError) as caught:
                model(model.params, batch)
            assert line_of(str(caught.value)) in lines_of(BLOCKS[name].function), (name, str(caught.value))
            assert "\n" not in str(caught.value)


def line_of(message: str) -> int:
    """Return the number of the line of this file that a message names."""
    return int(message.split("test_assumptions.py:")[1].split(":")[0])


def lines_of(function: Any) -> range:
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


class Cut(nn.Module):
    """The mean of the first columns of each row, of which a batch says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.linear(x) + x[:, : int(n.max())].mean(1, keepdim=True)


def lengths(largest: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(largest).standard_normal((rows, WIDTH)).astype(np.float32)
    return {"x": x, "n": np.arange(largest - rows + 1, largest + 1)}


def test_a_model_says_what_it_assumes(tmp_path: Path) -> None:
    model = from_torch(Cut(), lengths(4))
    assert len(model.assumptions) == 1
    text = repr(model)
    assert "reads 4" in text
    assert "test_assumptions.py" in text
    assert "assumes" not in repr(from_torch(nn.Linear(2, 2), np.ones((3, 2), np.float32)))
    model.save(tmp_path / "saved")
    saved = load_imported(tmp_path / "saved")
    assert saved.assumptions == model.assumptions
    with pytest.raises(UserError, match=r"reads 5 where it read 4 of the example \(test_assumptions.py:\d+"):
        saved(saved.params, lengths(5))


def test_other_shapes_are_captured_with_the_answers_of_their_own_batch() -> None:
    model = from_torch(Cut(), lengths(4))
    found = model(model.params, lengths(6, rows=3))[0]
    expected = model.to_torch()(**{name: torch.tensor(x) for name, x in lengths(6, rows=3).items()})
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5)
    assert len(model.assumptions) == 2


def test_a_batch_of_several_parts_is_checked_in_each() -> None:
    model = from_torch(Cut(), lengths(4))
    window = {name: np.stack([lengths(4)[name], lengths(5)[name]]) for name in ("x", "n")}
    assert "reads 5" in str(model.failed_assumption(window))
    assert "reads 5" in str(model.failed_assumption({name: x.reshape(-1, *x.shape[2:]) for name, x in window.items()}))
    assert model.failed_assumption({name: x[:1] for name, x in window.items()}) is None


def test_what_one_branch_assumes_is_checked_where_a_batch_takes_it() -> None:
    class CutIfAny(Cut):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return super().forward(x, n) if (n > 0).any() else self.linear(x)

    module = CutIfAny()
    model = from_torch(module, lengths(4))
    untaken = {**lengths(5), "n": -np.arange(ROWS)}
    for batch in (lengths(4), untaken):
        assert model.failed_assumption(batch) is None
        expected = module(**{name: torch.tensor(x) for name, x in batch.items()})
        np.testing.assert_allclose(model(model.params, batch)[0], expected.detach(), rtol=1e-5)
    message = model.failed_assumption(lengths(5))
    assert message is not None
    assert "reads 5 where it read 4" in message
    with pytest.raises(UserError, match="reads 5 where it read 4"):
        model(model.params, lengths(5))


def test_numbers_that_operations_take_are_not_assumed() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return super().forward(x) * n.max().item() + x[n[0].item()].sum() * (n.min().item() + 1)

    model = from_torch(module := Scaled(WIDTH, 3), lengths(3))
    assert model.assumptions == ()
    batch = {**lengths(4), "n": np.array([2, 7, 1, 0])}
    expected = module(**{name: torch.tensor(x) for name, x in batch.items()})
    np.testing.assert_allclose(model(model.params, batch)[0], expected.detach(), rtol=1e-4, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "random": (lambda self, x: x[:2] if torch.rand(()) < 0.5 else x, r"depends on random numbers"),
    "a number of floats": (lambda self, x: x[:, : int(x.abs().max() * 99)], r"floating-point values: forward reads \d"),
    "no floating-point output": (lambda self, x: x.argmax(1) if x.any() else x.argmax(1)[:2], r"NaN"),
    "state": (lambda self, x: counted(self, x), r"in its first call and .* in the next one"),
}


def counted(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return x[:, : int(self.count)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_assumed_is_refused_by_line(name: str) -> None:
    function, problem = REFUSED[name]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: Tensor) -> Any:
            return function(self, x)

    with pytest.raises(UserError, match=problem + r".*") as caught:
        from_torch(Module(), lengths(4)["x"])
    assert "test_assumptions.py:" in str(caught.value)


def loss_of(model: Any) -> Any:
    return model.loss(lambda y, batch: jt.Loss.of(y**2))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_first_step_warns_of_a_batch_that_is_assumed_away(precision: str) -> None:
    model = from_torch(Cut(), lengths(4))
    step = jt.train_step(loss_of(model), optax.sgd(0.1), precision=precision)
    with pytest.warns(UserWarning, match=r"the first loss is nan, because forward reads 5 .*test_assumptions.py:\d+"):
        step(step.init(model.params), lengths(5))


def run_of(n: np.ndarray, **settings: Any) -> jt.Recipe:
    model = from_torch(Cut(), lengths(4))
    x = np.random.default_rng(0).standard_normal((len(n), WIDTH)).astype(np.float32)
    task = model.task(lambda y, batch: jt.Loss.of(y**2), train={"x": x, "n": n})

    @dataclass(frozen=True, kw_only=True)
    class Run(jt.Recipe):
        batch_size: int = ROWS
        steps: int = 8

        def task(self) -> jt.Task:
            return task

    return Run(**settings)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_ends_at_a_batch_that_is_assumed_away_and_names_the_line(precision: str, tmp_path: Path) -> None:
    recipe = run_of(np.full(4 * ROWS, 5), precision=precision)
    with pytest.raises(UserError, match=r"the loss is nan, because forward reads 5 where it read 4 .*py:\d+"):
        jt.fit(recipe, tmp_path / "run", quiet=True)


def test_a_case_has_batches_for_which_the_assumptions_hold() -> None:
    model = from_torch(Cut(), lengths(4))
    verdict = check(model.case(), steps=2)
    assert verdict.passed, verdict.lines


def test_values_are_computed_wherever_a_pass_asks_for_them() -> None:
    x = torch.tensor([[1 / 3, 0.7]])
    expected = (x @ x.T).item()
    mode = FakeTensorMode()
    with (
        mode,
        enable_python_dispatcher(),
        torch.autocast("cpu"),
        torch.device("meta"),
        in_kernel_invocation_manager(mode),
    ):
        assert untraced(lambda: (x @ x.T + torch.zeros(1)).item()) == expected
