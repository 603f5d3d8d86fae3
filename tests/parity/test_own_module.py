"""The proof of an imported module is independent of the import: PyTorch's side is the user's own module.

A broken importer is one that imports another module than the user's: `wrong` is what it would have made of `right`.
"""

import collections
import dataclasses
import functools
import random
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain as jt
from jaxtrain.torch_import.capture.module.own_module import convert_tensors, lent
from parity import check
from parity.case import Case
from parity.cases.example_batches import Example
from parity.explain.locate import locate
from parity.sides.jax_side import arrays
from parity.sides.torch_side import seeded_model

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def beside(right: nn.Module, wrong: nn.Module, example: object) -> Case:
    """Return the case of `right`, whose import is that of `wrong`."""
    wrong.load_state_dict(right.state_dict())
    model = jt.from_torch(wrong, example)
    model.original = model.original._replace(module=lambda: right)
    return model.case()


def caught(case: Case) -> bool:
    """Whether a check finds a difference, or other random numbers."""
    try:
        return not check(case, steps=4).passed
    except jt.UserError as error:
        return "dropout masks" in str(error)


class Net(nn.Module):
    """A layer whose result `after` changes."""

    def __init__(self, after, **attributes) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("n", torch.zeros(()))
        self.__dict__.update(attributes)
        self.after = after

    def forward(self, x, *more, **named):
        return self.after(self, self.layer(x), *more, **named)


def concatenated(order):
    return lambda self, y, **named: torch.cat([y, *(named[name] for name in order(named))], -1)


def closed_over(net: Net) -> Net:
    layer = net.layer
    net.after = lambda self, y: y + F.gelu(layer(y))
    return net


def hashed(dtype):
    def after(self, y, ids):
        return y + ((ids.to(dtype) + 1) * 1000003 * 8191 % 1009).float()[:, None] / 1009

    return after


def averaged(once):
    def after(self, y):
        new = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        if self.training:
            self.mean.copy_(torch.where(self.n < 1, new, self.mean) if once else new)
            self.n.add_(1)
        return y - self.mean

    return after


def counted(self, y):
    self.calls += 1
    return y if self.calls < 3 else 2 * y


def hooked(net: Net) -> Net:
    net.register_forward_hook(lambda module, args, out: out + module.layer.bias)
    return net


def seeded(self, y):
    torch.manual_seed(0)
    return y + torch.randn(3)


def gradient_scaled(self, y):
    y = 1 * y
    y.register_hook(lambda g: 2 * g)
    return y


def plain(self, y, *more, **named):
    return y


SUM = {"b": X, "a": 2 * X}
MASK = (X, np.ones((4, 3), bool))
WRONG = {
    "sorted dict": lambda: (Net(concatenated(lambda d: d)), Net(concatenated(sorted)), {"x": X, **SUM}),
    "frozen closure": lambda: (
        closed_over(Net(plain)),
        Net(lambda self, y: y + F.gelu(F.linear(y, self.layer.weight.detach(), self.layer.bias.detach()))),
        X,
    ),
    "int64 in 32 bits": lambda: (Net(hashed(torch.int64)), Net(hashed(torch.int32)), (X, np.arange(4) * 7)),
    "float64 rounded": lambda: (
        Net(lambda self, y: (y.double() + 1e8 - 1e8).float()),
        Net(lambda self, y: y + 1e8 - 1e8),
        X,
    ),
    "float64 buffer rounded": lambda: (
        Net(lambda self, y: y + self.third.float(), third=torch.tensor(1 / 3, dtype=torch.float64)),
        Net(lambda self, y: y + 0.3333),
        X,
    ),
    "seed left out": lambda: (Net(seeded), Net(lambda self, y: y + torch.randn(3)), X),
    "outputs swapped": lambda: (Net(lambda self, y: (y, 2 * y)), Net(lambda self, y: (2 * y, y)), X),
    "gradient beside a loss": lambda: (
        Net(lambda self, y: {"loss": y.square().mean(), "hidden": 2 * y}),
        Net(lambda self, y: {"loss": y.square().mean(), "hidden": 2 * y.detach()}),
        X,
    ),
    "rows reordered": lambda: (Net(plain), Net(lambda self, y: y.flip(0)), X),
    "dropout of evaluation": lambda: (
        Net(lambda self, y: F.dropout(y, 0.5, True)),
        Net(lambda self, y: F.dropout(y, 0.5, self.training)),
        X,
    ),
    "evaluation as training": lambda: (Net(lambda self, y: y if self.training else 2 * y), Net(plain), X),
    "second update of a buffer": lambda: (Net(averaged(once=False)), Net(averaged(once=True)), X),
    "mask of fewer rows": lambda: (
        Net(lambda self, y, mask: y * mask),
        Net(lambda self, y, mask: y * mask if len(y) == 4 else y),
        (X, X > 0),
    ),
    "mask of ones": lambda: (Net(lambda self, y, mask: y * mask), Net(plain), MASK),
    "integers": lambda: (Net(lambda self, y: (y, y.argmax(-1))), Net(lambda self, y: (y, y.argmin(-1))), X),
    "NumPy's randomness": lambda: (
        Net(lambda self, y: y * float(np.random.rand())),
        Net(lambda self, y: y * 0.5),
        X,
    ),
    "Python's randomness": lambda: (Net(lambda self, y: y * random.random()), Net(lambda self, y: y * 0.5), X),
    "state of Python": lambda: (Net(counted, calls=0), Net(plain), X),
    "hook of the module": lambda: (hooked(Net(plain)), Net(plain), X),
    "hook of a tensor": lambda: (Net(gradient_scaled), Net(plain), X),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_broken_import_is_caught_and_the_users_module_left_as_it_was(fault) -> None:
    torch.manual_seed(1)
    right, wrong, example = WRONG[fault]()
    before = {name: x.clone() for name, x in right.state_dict().items()}
    attributes = {**vars(right)}
    assert caught(beside(right, wrong, example))
    assert vars(right) == attributes
    assert all(torch.equal(x, before[name]) for name, x in right.state_dict().items())


class Features(nn.Module):
    """Dicts in insertion order, lists, constants, dropout, statistics, and outputs of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 2)

    def forward(self, x, features, scale=1.0):
        y = self.out(self.drop(self.norm(torch.cat([x, *features], -1))))
        return {"z": scale * y, "a": y[:, 0].square(), "found": y.detach().argmax(-1), "is": y.detach() > 0}


def test_a_clean_module_raises_no_alarm_and_is_left_as_it_was() -> None:
    module, example = Features(), {"x": X, "features": [X, X[:, :1]], "scale": 2.0}
    module.out.weight.grad = torch.ones_like(module.out.weight)
    module.norm.eval()
    held = [(x, x.data_ptr(), x.clone()) for x in (*module.parameters(), *module.buffers(), module.out.weight.grad)]
    modes = [part.training for part in module.modules()]
    case = jt.from_torch(module, example).case()
    assert check(case, steps=3).passed
    assert check(case, "fp32", steps=1).passed
    assert locate(case) is None
    grad = module.out.weight.grad
    for (x, at, before), now in zip(held, (*module.parameters(), *module.buffers(), grad), strict=True):
        assert now is x
        assert now.data_ptr() == at
        assert torch.equal(now, before)
    assert [part.training for part in module.modules()] == modes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_module_is_called_with_the_users_structures_and_dtypes() -> None:
    @dataclasses.dataclass
    class Pair:
        b: torch.Tensor
        a: torch.Tensor

    Point = collections.namedtuple("Point", "y x")
    given = {
        "z": torch.arange(4, dtype=torch.int32),
        "a": (Pair(torch.ones(4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.bfloat16)), [Point(X, X > 0)]),
        "k": 2,
        "n": [3, None, collections.OrderedDict(d=np.arange(4), c=np.zeros((4, 1)))],
    }
    example = Example(given)
    batch = {name: torch.from_numpy(x) for name, x in example.batch(0, 3).items()}
    called = example.in_torch({name: x.float() if x.is_floating_point() else x for name, x in batch.items()})
    assert [*called] == [*given]
    (pair, (point,)), (three, nothing, ordered) = called["a"], called["n"]
    assert (called["k"], three, nothing, [*ordered], type(ordered)) == (2, 3, None, ["d", "c"], collections.OrderedDict)
    assert (type(pair), type(point)) == (Pair, Point)
    tensors = (called["z"], pair.b, pair.a, point.y, point.x, ordered["d"], ordered["c"])
    assert [x.dtype for x in tensors] == [
        torch.int32,
        torch.float64,
        *[torch.float32] * 2,
        torch.bool,
        torch.int64,
        torch.float32,
    ]
    assert {len(x) for x in tensors} == {3}


def test_a_module_is_in_use_once() -> None:
    case = jt.from_torch(nn.Linear(3, 2), X).case()
    with seeded_model(case, 0) as model:
        assert model is case.module
        with pytest.raises(RuntimeError, match="in use"), seeded_model(case, 0):
            pass
    with seeded_model(case, 0):
        pass
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    with pytest.raises(jt.UserError, match="has no weights"):
        jt.from_torch(empty, X).case()
    with pytest.raises(jt.UserError, match="4294967296, beyond int32"):
        arrays({"x": np.array([2**32])}, "fp64")


COUNTS = {"calls": 0}


class Layer(nn.Linear):
    seen: ClassVar[list[int]] = []

    def count(self) -> None:
        COUNTS["calls"] += 1
        self.seen.append(1)


def test_everything_that_a_module_reaches_is_set_back() -> None:
    layer = Layer(2, 2)
    layer.register_buffer("mean", torch.zeros(2))
    layer.weight.grad = torch.ones(2, 2)
    layer.same, layer.cache, layer.calls = layer.weight.data, {"a": [1]}, 0
    layer.space, layer.numbers = types.SimpleNamespace(n=1), np.arange(3)
    layer.random, layer.rng = random.Random(0), np.random.default_rng(0)
    closed = torch.ones(2)
    layer.act = functools.partial(lambda y, x: x + closed, None)
    state, others = (
        layer.random.getstate(),
        (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()),
    )
    with lent(layer), lent(layer):
        convert_tensors(layer, lambda dtype: torch.float64)
        assert layer.same.dtype == torch.float64
        with torch.no_grad():
            layer.weight.fill_(7)
        assert torch.equal(layer.same, layer.weight)
        layer.weight.register_hook(lambda g: g)
        layer.mean.add_(layer(torch.ones(1, 2, dtype=torch.float64))[0])
        layer.mean.sum().backward()
        layer.count()
        layer.cache["a"].append(2)
        layer.cache["b"] = layer.calls = layer.space.n = 5
        layer.numbers[:], closed[:] = 9, 9
        layer.random.random(), layer.rng.random(), random.random(), np.random.rand(), torch.rand(1)
        layer.weight = None
        layer.new = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert layer.same.data_ptr() == layer.weight.data_ptr()
    assert layer.weight.dtype == layer.same.dtype == torch.float32
    assert not (layer.weight == 7).any()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    assert not layer.weight._backward_hooks
    assert (layer.mean.tolist(), layer.mean.is_leaf, layer.mean.requires_grad) == ([0, 0], True, False)
    assert (layer.cache, layer.calls, layer.space.n) == ({"a": [1]}, 0, 1)
    assert (COUNTS, Layer.seen) == ({"calls": 0}, [])
    assert torch.equal(torch.get_rng_state(), others[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == others[1:]
    assert layer.numbers.tolist() == [0, 1, 2]
    assert closed.tolist() == [1, 1]
    assert layer.random.getstate() == state
    assert layer.rng.random() == np.random.default_rng(0).random()
    assert not hasattr(layer, "new")
