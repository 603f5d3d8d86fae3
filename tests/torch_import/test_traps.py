"""What a graph of a training forward pass silently gets wrong: each is right, or refused with the line."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.reference import Function, batch_of, compared


def without_gradient(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    with torch.no_grad():
        scale = y * 2
    return y * scale


def in_place(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = (x * module.w).clone()
    y[:, 0].mul_(2)
    y[y > 0] = 0.5
    y += x
    return y


def kinks(module: Any, x: torch.Tensor) -> torch.Tensor:
    z = module.w - module.w.detach()
    return z.abs() + F.relu(z) + z.clamp(0, 1) + F.hardtanh(z, 0, 1) + F.leaky_relu(z) + torch.maximum(z, -z) + x * 0


def counted(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.norm.running_mean.mul_(0.5)
    return module.norm(x * module.w)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Scaled(torch.autograd.Function):
    """Two outputs, one of integers; saved tensors, an attribute, a number, a tensor without and two with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, kept: torch.Tensor, x: torch.Tensor, factor: float, w: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.factor, ctx.largest = factor, x.amax()
        return x * w * factor * kept, (x > 0).long()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[None, torch.Tensor, None, torch.Tensor]:
        x, w = ctx.saved_tensors
        return None, grad * w * ctx.factor * 2, None, (grad * x).sum(0) * ctx.largest


def scaled(module: Any, x: torch.Tensor) -> torch.Tensor:
    y, positive = Scaled.apply(x < 1, x * module.w, 3.0, module.w)
    return y * positive


CASES: dict[str, Callable[[], nn.Module]] = {
    "detach": lambda: Function(lambda m, x: x * m.w * m.w.detach()),
    "no_grad": lambda: Function(without_gradient),
    "in_place": lambda: Function(in_place),
    "kinks": lambda: Function(kinks),
    "straight_through": lambda: Function(lambda m, x: StraightThrough.apply(x * m.w) * m.w),
    "own_gradient": lambda: Function(scaled),
    "batch_norm": lambda: Function(counted, norm=nn.BatchNorm1d(3, dtype=torch.float64)),
    "tied": lambda: Function(lambda m, x: m.b(m.a(x)), **tied()),
    "promotion": lambda: Function(lambda m, x: (x > 0) * m.w + (x > 1).sum(0) / 2 + torch.arange(3) * m.w**2),
}


def tied() -> dict[str, nn.Module]:
    a, b = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)
    b.weight = a.weight
    return {"a": a, "b": b}


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_buffers_are_pytorchs(name: str) -> None:
    differences, _ = compared(CASES[name](), batch_of(4, 3))
    assert max(differences) <= 1e-14, differences


def test_instance_norm_moves_its_running_statistics() -> None:
    norm = nn.InstanceNorm1d(3, track_running_stats=True, affine=True, dtype=torch.float64)
    differences, model = compared(norm, batch_of(2, 3, 5))
    assert model.state is not None
    assert {"running_mean", "running_var"} <= model.state.keys()
    assert max(differences) <= 1e-14, differences


def test_a_tied_weight_is_one_parameter() -> None:
    _, model = compared(CASES["tied"](), batch_of(4, 3))
    assert sorted(model.params) == ["a.bias", "a.weight", "b.bias", "w"]


def test_a_parameter_without_gradient_is_frozen() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Embedding(5, 2))
    module[0].bias.requires_grad_(False)
    model = from_torch(
        module, np.ones((1, 3), np.float32), call=lambda module, x: module[0](x) + module[1].weight.detach()[0]
    )
    assert [model.frozen(name) for name in ("0.weight", "0.bias", "1.weight")] == [False, True, True]


def test_dropout_draws_a_mask_for_each_key_and_none_in_evaluation() -> None:
    model = from_torch(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), x := np.ones((2, 8), np.float32))
    first, again, other = (model(model.params, x, jax.random.key(seed))[0] for seed in (0, 0, 1))
    evaluated, _ = model(model.params, x)
    assert (first == again).all()
    assert (first != other).any()
    dropped = np.asarray(first == 0)
    assert 0.2 < dropped.mean() < 0.8
    np.testing.assert_allclose(np.asarray(first)[~dropped], 2 * np.asarray(evaluated)[~dropped], rtol=1e-6)


def test_an_idle_buffer_is_a_constant_and_a_plain_tensor_too() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0))
            self.plain = torch.tensor([3.0, 4.0, 5.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table + self.plain + torch.tensor([1.0, 2.0, 3.0])

    model = from_torch(Plain(), np.ones((2, 3), np.float32))
    assert model.state is None
    assert model({}, jnp.ones((2, 3)))[0][0].tolist() == [4.0, 7.0, 10.0]


def coin(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.w if random.random() < 0.5 else x


def selected(module: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * module.w)[x > 0]


def changed_without_gradient(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * module.w
    with torch.no_grad():
        y.mul_(2)
    return y


def changed_input(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) * module.w


class Answer:
    """Nothing that PyTorch knows the parts of."""


def answered(module: Any, x: torch.Tensor) -> Any:
    return x * module.w, Answer()


def unknown(module: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.special.bessel_j0(x * module.w)


@pytest.mark.parametrize(
    ("fn", "message", "line"),
    [
        (coin, "random.random would be drawn once", "random.random() < 0.5"),
        (selected, "shape of a result depends on a tensor's value", "[x > 0]"),
        (changed_without_gradient, "in place under torch.no_grad", "y.mul_(2)"),
        (unknown, "has no JAX counterpart", "torch.special.bessel_j0"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_its_line(fn: Any, message: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        from_torch(Function(fn), batch_of(4, 3))
    assert all(text in str(error.value) for text in (message, line, "test_traps.py:"))


@pytest.mark.parametrize(("fn", "message"), [(changed_input, "changes its input"), (answered, "returns a Answer")])
def test_what_a_pure_function_cannot_return_is_refused(fn: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_torch(Function(fn), batch_of(4, 3))


def test_hooks_on_gradients_are_refused() -> None:
    module = nn.Linear(3, 3)
    module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="has a backward hook"):
        from_torch(module, np.ones((1, 3), np.float32))
    module = nn.Linear(3, 3)
    module.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(UserError, match="parameter 'weight' has a gradient hook"):
        from_torch(module, np.ones((1, 3), np.float32))
