"""Values that a graph cannot contain: times, arrays of NumPy, parameters that forward makes."""

import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.module.own_module import lent
from jaxtrain.user_file import import_file

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Logged(nn.Module):
    """A layer that logs what a graph does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.seconds = nn.Linear(3, 2), [], 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        y = self.linear(x)
        self.seen.append(y.detach().squeeze().numpy())
        self.seconds += time.perf_counter() - start
        if time.time() > start + 1e9:
            print(f"{self.seconds:.3f} {int(self.seconds)}")
        return y


def test_what_is_only_logged_is_left_out() -> None:
    module = Logged()
    model = jt.from_torch(module, X)
    assert module.seen == []
    expected = module(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(model(model.params, X)[0], expected, rtol=1e-6)


FORWARDS = {
    "seconds": (lambda y: y * (time.perf_counter() % 1), "time.perf_counter.. inside forward"),
    "difference of times": (lambda y: torch.full((2,), time.time() - time.monotonic()) + y, "inside forward"),
    "rounded": (lambda y: torch.round(y + time.process_time() * 1e-3), "time.process_time.. inside forward"),
    "sum of an array": (lambda y: y * float(y.detach().numpy().sum()), "read as an array of NumPy"),
    "array": (lambda y: y * (1 + y.detach().numpy()), "read as an array of NumPy"),
    "function of an array": (lambda y: y + np.abs(y.detach().numpy()).max(), "read as an array of NumPy"),
    "array as a tensor": (lambda y: y * torch.from_numpy(y.detach().numpy()), "cannot be traced"),
    "returned array": (lambda y: (y, y.detach().numpy()), "read as an array of NumPy"),
    "layer": (lambda y: nn.Linear(2, 2)(y), "a parameter that is made inside forward"),
    "parameter": (lambda y: y + nn.Parameter(torch.ones(2)), "a parameter that is made inside forward"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_an_operation_reads_is_refused_by_line(name: str) -> None:
    forward, problem = FORWARDS[name]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self.linear(x))

    with pytest.raises(UserError, match=problem) as error:
        jt.from_torch(Module(), X)
    assert "test_outside.py:" in str(error.value)


def test_large_constants_of_float64_are_read_from_a_file(tmp_path: Any) -> None:
    table = np.sin(np.arange(30.0).reshape(10, 3))

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(3, 2), torch.from_numpy(table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + (self.table[2:6] * 1e6 % 1).float())

    model = jt.from_torch(Positions(), X)
    path, *_ = model.save_source(tmp_path / "model.py")
    assert "F.load_buffers(" in path.read_text()
    with jax.numpy_rank_promotion("allow"):
        found, _ = import_file(path).model(model.params, X)
    np.testing.assert_array_equal(found, model(model.params, X)[0])
    weight, bias = (np.asarray(model.params[f"linear.{name}"], np.float64) for name in ("weight", "bias"))
    np.testing.assert_allclose(found, (X + table[2:6] * 1e6 % 1) @ weight.T + bias, rtol=1e-5)


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a method of a user's container was called")


METHODS = (
    *("__getitem__", "__setitem__", "__iter__", "__len__", "__eq__", "keys", "values", "items"),
    *("update", "clear", "append", "extend", "add"),
)
"""Methods that a container may have of its own, as one that makes an object for each key."""


@pytest.mark.parametrize("base", [dict, OrderedDict, defaultdict, Counter, list, set, deque])
def test_own_containers_are_left_as_they_are(base: type) -> None:
    own = type("Own", (base,), {name: _fail for name in METHODS if hasattr(base, name)})
    held = base.__new__(own)
    keep = {list: list.append, deque: deque.append, set: set.add}.get(base)
    members = [object(), object(), object()]
    for member in members:
        keep(held, member) if keep else base.__setitem__(held, member, member)
    if base is OrderedDict:
        OrderedDict.move_to_end(held, members[0])
    held.count = [0]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.count[0] += 1
            keep(held, 3) if keep else base.__setitem__(held, 3, 3)
            return self.linear(x)

    before = [*base.__iter__(held)]
    module = Module()
    with lent(module):
        expected = module(torch.from_numpy(X)).detach().numpy()
    assert [*map(id, base.__iter__(held))] == [*map(id, before)]
    assert held.count == [0]
    model = jt.from_torch(module, X)
    np.testing.assert_allclose(model(model.params, X)[0], expected, rtol=1e-6)
