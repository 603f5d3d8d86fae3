"""Every tensor that a captured program reads has its place in the module, in whatever way a function reaches it."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from jaxtrain.torch_import.capture.module.copying import Memory
from parity import check
from tests.torch_import.reference import Function, batch_of, compared

Use = Callable[[torch.Tensor, Any], torch.Tensor]


class Net(nn.Module):
    """Outputs of functions that it holds, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.fc, self.norm = nn.Parameter(torch.randn(3)), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.carrier = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("steps", torch.zeros(3))
        self.double()
        self.functions: Any = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return torch.cat([self.carrier(x), *(fn(x) for fn in self.functions)], -1)


KINDS: dict[str, Callable[[Net], Any]] = {
    "parameter": lambda net: net.w,
    "weight": lambda net: net.fc.weight,
    "buffer": lambda net: net.table,
    "changed_buffer": lambda net: net.steps,
    "alias": lambda net: net.w.data,
    "alias_of_changed_buffer": lambda net: net.steps[1:],
    "row": lambda net: net.fc.weight.data[1],
    "row_with_gradient": lambda net: net.fc.weight[1],
    "transposed": lambda net: net.fc.weight.t(),
    "column": lambda net: net.fc.weight[::2, 1],
    "block": lambda net: net.fc.weight.data[1:, :2].t(),
    "flat": lambda net: net.fc.weight.data.view(-1),
    "part": lambda net: net.norm,
    "method": lambda net: net.norm.forward,
    "constant": lambda net: torch.arange(3.0, dtype=torch.float64),
}
"""What a function reaches."""


def use(x: torch.Tensor, held: Any) -> torch.Tensor:
    if not isinstance(held, torch.Tensor):
        return held(x)
    return x @ held if held.shape == (3, 3) else x * held.sum() + torch.sin(x) * held.mean()


class Holder:
    """An object without a class of PyTorch."""

    def __init__(self, held: Any) -> None:
        self.held = {"key": [held]}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return use(x, self.held["key"][0])


def nested(held: Any) -> Any:
    def outer(x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return use(y, held)

        return inner(x)

    @functools.wraps(outer)
    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return outer(x)

    return wrapped


def recursive(held: Any) -> Any:
    def fn(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return fn(x, depth - 1) if depth else use(x, held)

    return fn


def by_global(net: Net, kind: Callable[[Net], Any]) -> Any:
    scope: dict[str, Any] = {"net": net, "kind": kind, "use": use}
    exec("def read():\n    return kind(net)\ndef fn(x):\n    return use(x, read())", scope)
    return scope["fn"]


def weak(net: Net, kind: Callable[[Net], Any]) -> Any:
    ref = weakref.ref(net)
    return lambda x: use(x, kind(ref()))


def proxy(net: Net, kind: Callable[[Net], Any]) -> Any:
    ref = weakref.proxy(net)
    return lambda x: use(x, kind(ref))


WAYS: dict[str, Callable[[Net, Callable[[Net], Any], Any], Any]] = {
    "closure_over_self": lambda net, kind, held: lambda x: use(x, kind(net)),
    "partial": lambda net, kind, held: functools.partial(use, held=held),
    "weak_reference": lambda net, kind, held: weak(net, kind),
    "closure": lambda net, kind, held: lambda x: use(x, held),
    "default": lambda net, kind, held: lambda x, held=held: use(x, held),
    "keyword": lambda net, kind, held: lambda x, *, held=held: use(x, held),
    "nested": lambda net, kind, held: nested(held),
    "recursive": lambda net, kind, held: recursive(held),
    "method": lambda net, kind, held: types.MethodType(lambda self, x: use(x, held), net),
    "object": lambda net, kind, held: Holder(held),
    "object_with_function": lambda net, kind, held: Holder(lambda x: use(x, held)),
    "weak_proxy": lambda net, kind, held: proxy(net, kind),
    "global": lambda net, kind, held: by_global(net, kind),
}
"""How a function that a module holds reaches it."""


def attached_as_functions(net: Net, functions: list[Any]) -> None:
    net.functions = functions


def attached_as_hook(net: Net, functions: list[Any]) -> None:
    net.carrier.register_forward_hook(lambda part, given, y: torch.cat([y, *(fn(given[0]) for fn in functions)], -1))


def attached_as_patch(net: Net, functions: list[Any]) -> None:
    old = net.carrier.forward
    net.carrier.forward = lambda x: torch.cat([old(x), *(fn(x) for fn in functions)], -1)  # type: ignore[method-assign]


def attached_to(way: str) -> Callable[[Net, list[Any]], None]:
    """Return one of the three places of functions, each with some ways."""
    return (attached_as_functions, attached_as_hook, attached_as_patch)[list(WAYS).index(way) % 3]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_gradients_and_buffers_are_pytorchs(way: str, train: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), batch_of(4, 3)
    attached_to(way)(net, [WAYS[way](net, kind, kind(net)) for kind in KINDS.values()])
    differences, model = compared(net, x, train=train)
    assert max(differences) < 1e-13
    assert sorted(model.params) == sorted(name for name, _ in net.named_parameters())

    # Other weights reach everything that holds them, in the module itself and in a copy.
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(2)
    with jax.enable_x64():
        params = jax.tree.map(lambda p: 2 * p, model.params)
        state = {name: net.get_buffer(name).numpy().copy() for name in model.state or ()}
        outputs, _ = model(params, x, None, state)
        for theirs in (net.eval(), model.to_torch(params, state).eval()):
            np.testing.assert_allclose(outputs, theirs(torch.tensor(x)).detach().numpy(), rtol=1e-13, atol=1e-13)


def weight_normed() -> nn.Module:
    conv = nn.utils.weight_norm(nn.Conv1d(3, 3, 2))
    return nn.Sequential(conv, nn.Tanh(), nn.utils.weight_norm(nn.Conv1d(3, 2, 1), dim=None))


def pruned() -> nn.Module:
    fc = nn.Linear(3, 3)
    prune.l1_unstructured(fc, "weight", amount=0.4)
    prune.random_unstructured(fc, "bias", amount=0.3)
    return fc


def spectral_normed() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))


def reparametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


RECOMPUTED = {"weight_norm": weight_normed, "prune": pruned, "spectral": spectral_normed, "new": reparametrized}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", RECOMPUTED)
def test_weights_that_hooks_compute_before_each_call(name: str) -> None:
    torch.manual_seed(0)
    module = RECOMPUTED[name]()
    shape = (2, 3, 4) if name == "weight_norm" else (4, 3)
    differences, _ = compared(module.double(), batch_of(*shape))
    assert max(differences) < 1e-13

    case = from_torch(RECOMPUTED[name](), batch_of(*shape).astype(np.float32)).case()
    assert check(case, steps=2).passed


class Squared(torch.autograd.Function):
    weight: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Squared.weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * Squared.weight


def in_a_list() -> nn.Module:
    module = Function(lambda m, x: m.hidden[0](x * m.w))
    module.hidden = [nn.Linear(3, 3).double()]
    return module


def unregistered() -> nn.Module:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return Function(lambda m, x: x * m.w * weight)


def returned() -> nn.Module:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return Function(lambda m, x: weight)


def stale() -> nn.Module:
    module = Function(lambda m, x: x * m.scaled)
    module.scaled = module.w * 2
    return module


def second_parameter() -> nn.Module:
    module = Function(lambda m, x: x * m.w + m.hidden[0])
    module.hidden = [nn.Parameter(module.w.data)]
    return module


def two_parameters() -> nn.Module:
    module = Function(lambda m, x: x * m.w + m.other)
    module.other = nn.Parameter(module.w.data)
    return module


def overlapping() -> nn.Module:
    module = Function(lambda m, x: x * m.w)
    whole = torch.zeros(4, 3, dtype=torch.float64)
    module.first, module.second = nn.Parameter(whole[:3]), nn.Parameter(whole[2:])
    return module


def buffer_of_a_parameter() -> nn.Module:
    module = Function(lambda m, x: x * m.w + m.buffer)
    module.register_buffer("buffer", module.w.data)
    return module


def buffers_that_change() -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.mean.add_(x.mean(0))
        return x * m.w + m.same

    module = Function(forward)
    module.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
    module.register_buffer("same", module.mean[:])
    return module


def replaced_buffer() -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * m.w + m.first()
        m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
        return y

    module = Function(forward)
    module.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
    mean = module.mean
    module.first = lambda: mean * 2
    return module


def as_other_dtype() -> nn.Module:
    module = Function(lambda m, x: x * m.w + m.bits)
    module.bits = module.w.data.view(torch.int64)
    return module


def of_a_class() -> nn.Module:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * module.fc.weight[0]

    module = nn.Sequential(Reading())
    module.fc = nn.Linear(3, 3).double()
    return module


def part_of_a_class() -> nn.Module:
    class Calling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return module.drop(x)

    module = nn.Sequential(Calling())
    module.add_module("fc", nn.Linear(3, 3).double())
    module.drop = nn.Dropout(0.5)
    return module


def mode_of_a_class() -> nn.Module:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if module.training else x

    module = nn.Sequential(Reading(), nn.Linear(3, 3).double())
    return module


def in_a_function_of_autograd() -> nn.Module:
    module = Function(lambda m, x: Squared.apply(x * m.w))
    Squared.weight = module.w
    return module


def closure_in_a_function_of_autograd() -> nn.Module:
    module = Function(lambda m, x: m.squared(x * m.w))
    weight = module.w

    class Own(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x * 2)  # type: ignore[assignment]
        backward = staticmethod(lambda ctx, grad: grad * weight)  # type: ignore[assignment]

    module.squared = lambda x: Own.apply(x)
    return module


def sparse() -> nn.Module:
    module = Function(lambda m, x: x @ (m.matrix @ torch.diag(m.w)))
    module.register_buffer("matrix", torch.eye(3, dtype=torch.float64).to_sparse())
    return module


REFUSED: dict[str, tuple[Any, ...]] = {
    "in_a_list": (in_a_list, "is no parameter of the module", "test_placing.py:", "hidden[0]"),
    "returned": (returned, "is no parameter of the module"),
    "stale": (stale, "computed from parameters before the call", "test_placing.py:", "scaled"),
    "overlapping": (overlapping, "'first' and 'second' are two tensors in the same memory"),
    "buffers_that_change": (buffers_that_change, "buffers 'mean' and 'same' share memory"),
    "of_a_class": (of_a_class, "is read by a global", "test_placing.py:", "module.fc.weight"),
    "part_of_a_class": (part_of_a_class, "Dropout, is called by a global", "test_placing.py:", "module.drop"),
    "in_a_function_of_autograd": (in_a_function_of_autograd, "test_placing.py:", "Squared"),
    "sparse": (sparse, "'matrix' is a sparse tensor"),
    "unregistered": (unregistered, "is no parameter of the module", "test_placing.py:", "weight"),
    "second_parameter": (second_parameter, "is no parameter of the module", "test_placing.py:", "hidden"),
    "two_parameters": (two_parameters, "'w' and 'other' are two tensors in the same memory"),
    "buffer_of_a_parameter": (buffer_of_a_parameter, "'w' and 'buffer' are two tensors in the same memory"),
    "replaced_buffer": (replaced_buffer, "buffer 'mean' of Function is replaced"),
    "as_other_dtype": (as_other_dtype, "shares memory with 'w'"),
    "mode_of_a_class": (mode_of_a_class, "the mode of the module is read by", "test_placing.py:", "module.training"),
    "closure_of_a_backward_pass": (
        closure_in_a_function_of_autograd,
        "is read by",
        "test_placing.py:",
        "grad * weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_is_refused_with_its_line(name: str) -> None:
    make, *texts = REFUSED[name]
    with jax.enable_x64(), pytest.raises(UserError) as refused:
        from_torch(make(), batch_of(4, 3))
    assert all(text in str(refused.value) for text in texts), refused.value
    assert "\n" not in str(refused.value)


def test_the_original_is_not_called_or_changed() -> None:
    net = Net().eval()
    net.functions = [lambda x: net.norm(x)]
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with jax.enable_x64():
        from_torch(net, batch_of(4, 3))
        with pytest.raises(UserError, match="a part of the module, Linear, is called"):
            from_torch(net, batch_of(4, 3), call=lambda module, x: net.fc(x))
    assert not net.norm.training
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_a_part_under_two_names() -> None:
    norm = nn.BatchNorm1d(3).double()
    module = Function(lambda m, x: m.second(x * m.w), first=norm, second=nn.Sequential(norm))
    differences, model = compared(module, batch_of(4, 3))
    assert max(differences) < 1e-13
    assert sorted(model.state or ()) == [f"first.{name}" for name in sorted(dict(norm.named_buffers()))]


def test_tensors_with_common_elements_are_found() -> None:
    rng, places = np.random.default_rng(0), torch.arange(40)
    for _ in range(1000):
        views = [
            places.as_strided(shape, steps, start)
            for shape, steps, start in zip(*rng.integers(0, 4, (2, 2, 2)).tolist(), rng.integers(0, 9, 2), strict=True)
        ]
        first, second = ({*view.flatten().tolist()} for view in views)
        assert [*Memory(dict(zip("xy", views, strict=True))).shared()] == [("x", "y")] * bool(first & second)


def test_writes_through_aliases() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.tail.add_(x.mean(0)[1:].detach())
        m.middle.mul_(2)
        return x * m.w + m.total

    module = Function(forward)
    module.register_buffer("total", torch.ones(3, dtype=torch.float64))
    module.tail, module.middle = module.total[1:], module.total[1]
    differences, model = compared(module, batch_of(4, 3))
    assert max(differences) < 1e-13
    assert [*(model.state or ())] == ["total"]


def test_hidden_parameters_are_constants_without_a_gradient() -> None:
    module = Function(lambda m, x: x * m.w + m.teacher[0](x) + m.without(x))
    module.teacher = [nn.Linear(3, 3).double().requires_grad_(False)]
    module.without = torch.no_grad()(nn.Linear(3, 3).double().forward)
    differences, _ = compared(module, batch_of(4, 3))
    assert max(differences) < 1e-13


ITEMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "divided": lambda m, x: m.w * x / x.abs().max().item(),
    "arithmetic": lambda m, x: m.w * x * (1.0 / (x.std().item() + 1e-3)) + (m.w.sum().item() - 2) ** 2,
    "count": lambda m, x: x * m.w * (x > 0).sum().item() + (x < 0).sum().item(),
    "slope": lambda m, x: F.leaky_relu(x * m.w, x.abs().mean().item()) * (x < 9).all().item(),
    "added": lambda m, x: torch.add(x * m.w, x.min().item(), alpha=2),
}


@pytest.mark.parametrize("name", ITEMS)
def test_the_value_of_a_tensor_as_a_number(name: str) -> None:
    differences, _ = compared(Function(ITEMS[name]), batch_of(4, 3))
    assert max(differences) < 1e-13


@pytest.mark.parametrize("module", [nn.Linear(3, 3, bias=False), nn.LayerNorm(3)], ids=["matrices", "vectors"])
def test_a_module_with_matrices_or_vectors_alone_is_proved(module: nn.Module) -> None:
    assert check(from_torch(module, batch_of(4, 3).astype(np.float32)).case(), steps=2).passed


def test_a_buffer_is_replaced_beside_an_attribute_that_keeps_an_activation() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.fc(x)
            self.mean = self.mean * 0.9 + self.last.detach().mean(0) * 0.1
            return self.last - self.mean

    module = Module()
    x = np.ones((4, 3), np.float32)
    model = from_torch(module, x)
    y, state = model(model.params, x, jax.random.key(0), model.state)
    np.testing.assert_allclose(y, module(torch.tensor(x)).detach(), atol=1e-6)
    assert state is not None
    np.testing.assert_allclose(state["mean"], module.mean.detach(), atol=1e-6)
