"""Gradients inside `forward` are PyTorch's, and so are the gradients of all parameters through them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported, pytorchs_promotion
from jaxtrain.user_file import import_file
from parity import check
from parity.explain.locate import locate
from tests.torch_import.reference import Function, batch_of, compared


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * g * x**2, None


def in_place(m: Any, x: Tensor) -> Tensor:
    y = (x * m.w).clone()
    y[:, 0].mul_(2)
    y += x.roll(1, 0)
    return y**4


def partly_detached(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * m.w).exp()
    return scale * x**3 + x.detach() * x**2 * m.w


def of_batch_norm(m: Any, x: Tensor) -> Tensor:
    return m.norm(x * m.w) ** 3 * x


X = batch_of(4, 3)
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "polynomial": lambda m, x: x**4 * m.w + (x @ torch.outer(m.w, m.w)) ** 2,
    "network": lambda m, x: m.net(x),
    "convolution": lambda m, x: F.conv1d(torch.sin(x).T[None], m.w[:, None, None] * torch.ones(3, 3, 1, dtype=x.dtype)),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[None] * m.w, x[None], x[None]) ** 2,
    "layer_norm": lambda m, x: F.layer_norm(x**2, (3,), m.w),
    "batch_norm": of_batch_norm,
    "kinks": lambda m, x: F.relu(x) ** 4 * m.w + x.clamp(min=0.1) ** 4 + F.gelu(x * m.w),
    "views": lambda m, x: (x.view(-1)[::2] ** 4 * x.T.reshape(-1)[1::2]).view(2, -1) * m.w.sum(),
    "in_place": in_place,
    "partly_detached": partly_detached,
    "own_gradient": lambda m, x: Cube.apply(x * m.w, 0.5) ** 2,
    "inner_gradient": lambda m, x: grad((x**3 * m.w).sum(), x, create_graph=True)[0] * x**3,
}


def assigned(m: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


SOURCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch": lambda m, x: x.requires_grad_(),
    "assigned": assigned,
    "detached": lambda m, x: (x * m.w).detach().requires_grad_(True),
    "hidden": lambda m, x: torch.tanh(x * m.w),
    "view": lambda m, x: (x.flatten() * m.w.sum()).view(4, 3),
}
COTANGENTS: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "ones": lambda m, y: torch.ones_like(y),
    "weighted": lambda m, y: torch.cos(torch.arange(y.numel(), dtype=y.dtype).view(y.shape)),
    "learned": lambda m, y: torch.sigmoid(y) * m.w.sum(),
    "of_sum": lambda m, y: None,
}


def derivatives(fn: Any, source: Any, cotangent: Any, order: int, last: str) -> Callable[[Any, Tensor], Any]:
    """Return a forward pass with derivatives of an order by a tensor, beside one that is not used."""

    def forward(m: Any, x: Tensor) -> Any:
        x = source(m, x)
        other = torch.ones(2, dtype=x.dtype, requires_grad=True)
        values = [fn(m, x)]
        for i in range(order):
            y = values[-1]
            kept = last != "detached" or i < order - 1
            y, g = (y.sum(), None) if (g := cotangent(m, y)) is None else (y, g)
            if last == "unused":
                found, none = grad(y, (x, other), g, create_graph=True, allow_unused=True)
                assert none is None
            elif last == "materialized":
                zeros, found = grad(y, [other, x], g, create_graph=True, materialize_grads=True)
                found = found + zeros.sum()
            else:
                (found,) = grad(y, x, g, create_graph=kept, retain_graph=True)
            values.append(found)
        return (*values, x * m.w)

    return forward


SINCE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
ENDS = ("kept", "detached", "unused", "materialized")


def cases() -> list[tuple[str, ...]]:
    """Return cases in which every two choices appear together, in an order of their own."""
    rng = np.random.default_rng(0)
    everything = [*itertools.product(FUNCTIONS, SOURCES, COTANGENTS, "123", ENDS, ("train", "eval"))]
    found, pairs = [], set[Any]()
    for i in rng.permutation(len(everything)):
        new = {*itertools.combinations(enumerate(everything[i]), 2)} - pairs
        if len(new) >= 6:
            found.append(everything[i])
            pairs |= new
    return found


def module_of(fn: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    return Function(fn, net=net, norm=nn.BatchNorm1d(3, dtype=torch.float64))


def of_case(case: tuple[str, ...]) -> Callable[[Any, Tensor], Any]:
    fn, source, cotangent, order, last, _ = case
    return derivatives(FUNCTIONS[fn], SOURCES[source], COTANGENTS[cotangent], int(order), last)


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_derivatives_and_their_gradients_are_pytorchs(case: tuple[str, ...]) -> None:
    fn, *_, order, _, mode = case
    try:
        differences, _ = compared(module_of(of_case(case)), batch_of(4, 3), train=mode == "train")
    except UserError as error:
        # Since PyTorch 2.14 these have no derivative of third order while they are traced.
        is_known = SINCE_2_14 and order == "3" and fn in ("attention", "batch_norm")
        if not is_known or "(test_gradients_in_forward.py:" not in str(error):
            raise
        return
    assert max(differences) <= 1e-10, differences


def several_inputs(m: Any, x: Tensor) -> Any:
    x.requires_grad_()
    h = x * m.w
    y = (h**2 * x).sum()
    both = grad(y, (x, h, m.w, x), create_graph=True)
    return y, *both


def before_it_required_one(m: Any, x: Tensor) -> Any:
    before = x**3
    x.requires_grad_()
    return grad((before * x * m.w).sum(), x, create_graph=True)[0] * m.w


def within_no_grad(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = m.w.exp()
        leaf = (x * scale).requires_grad_()
        fixed = leaf * 2
        with torch.enable_grad():
            found = grad((leaf**3 * fixed).sum(), leaf)[0]
        moved = leaf - 0.1 * found
    return moved * m.w


def learned_update(m: Any, x: Tensor) -> Tensor:
    w = m.w
    for _ in range(2):
        w = w - 0.1 * grad((torch.tanh(x * w) ** 2).sum(), w, create_graph=True)[0]
    return torch.tanh(x * w)


def energies(m: Any) -> Callable[[Tensor], Tensor]:
    return lambda row: torch.tanh(row * m.w).prod() + m.net(row).sum()


def of_rows(m: Any, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(energies(m)))(x)


def of_rows_twice(m: Any, x: Tensor) -> Any:
    second = torch.func.grad(torch.func.grad(lambda t, scale: torch.sin(t * scale).prod() * t**2))
    return torch.func.vmap(second, (0, None))(x[:, 0], m.w)


def with_value(m: Any, x: Tensor) -> Any:
    found, (value, aux) = torch.func.grad_and_value(
        lambda w, x: ((y := torch.sin(x * w)).square().sum(), y), argnums=(0, 1), has_aux=True
    )(m.w, x)
    return *found, value, aux


def penalty(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(lambda x: (x * m.w).square().sum(1), x, create_graph=True)


def changed_itself(m: Any, x: Tensor) -> Any:
    h = (x * m.w).view(-1)
    y = h.sum()
    h.mul_(2)
    return grad((h**3).sum(), h, create_graph=True)[0] + y


def langevin(m: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    for _ in range(2):
        found = grad((torch.tanh(x * m.w) ** 2).sum(), x)[0]
        with torch.no_grad():
            x = x - 0.1 * found
        x.requires_grad_()
    for _ in range(2):
        found = grad((torch.tanh(x * m.w) ** 2).sum(), x)[0]
        x.data.add_(found, alpha=-0.1)
    return x.detach() * m.w


OTHERS = {
    "changed_itself": changed_itself,
    "langevin": langevin,
    "several_inputs": several_inputs,
    "before_it_required_one": before_it_required_one,
    "within_no_grad": within_no_grad,
    "learned_update": learned_update,
    "of_rows": of_rows,
    "of_rows_twice": of_rows_twice,
    "with_value": with_value,
    "jacobian": penalty,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_are_pytorchs(name: str) -> None:
    differences, _ = compared(module_of(OTHERS[name]), batch_of(4, 3))
    assert max(differences) <= 1e-12, differences


def test_random_numbers_are_those_of_the_differentiated_operations(tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x = F.dropout(x, 0.5).requires_grad_()
        y = F.dropout(x * m.w, 0.5)
        return y, grad(y.sum(), x, create_graph=True)[0] * x, F.dropout(x, 0.5)

    x = np.ones((4, 30, 3), np.float32)
    model = from_torch(module_of(forward).float(), x)
    y, again, other = model(model.params, x, jax.random.key(0))[0]
    np.testing.assert_allclose(y, again, rtol=1e-6)
    assert 0.1 < float(jnp.mean(y == 0)) < 0.9
    assert bool(jnp.any((other == 0) != (y == 0)))
    model.save(tmp_path / "model")
    loaded = load_imported(tmp_path / "model")
    assert np.array_equal(loaded(model.params, x, jax.random.key(0))[0][1], again)


def test_what_was_computed_before_is_constant_in_float32_too() -> None:
    model = from_torch(module_of(before_it_required_one).float(), X.astype(np.float32))
    found = model(model.params, X)[0]
    np.testing.assert_allclose(found, X**3 * np.square(model.params["w"]), rtol=1e-5)


def test_a_module_without_parameters_has_gradients() -> None:
    x = X.astype(np.float32)
    model = from_torch(nn.Tanh(), x, call=lambda m, x: grad(m(x.requires_grad_()).sum(), x, create_graph=True)[0])
    np.testing.assert_allclose(model({}, x)[0], 1 - np.tanh(x) ** 2, rtol=1e-5)


WRITTEN = {**{"-".join(case): of_case(case) for case in cases()}, **OTHERS}


def of_dropout(m: Any, x: Tensor) -> Tensor:
    return grad(F.dropout(x.requires_grad_() * m.w, training=m.training).sum(), x, create_graph=True)[0]


UNWRITTEN = {
    "several_inputs": (several_inputs, "with respect to values that depend on each other"),
    "dropout": (of_dropout, "random numbers"),
}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in UNWRITTEN])
def test_the_source_computes_the_gradients(name: str, tmp_path: Path) -> None:
    x = X.astype(np.float32)
    try:
        model = from_torch(module_of(WRITTEN[name]).float(), x)
    except UserError:
        assert SINCE_2_14
        return
    model.save_source(tmp_path / "model.py")
    own = import_file(tmp_path / "model.py").model
    for key in (None, jax.random.key(0)):
        theirs = model(model.params, x, key)[0]
        with pytorchs_promotion():
            ours = own(model.params, x, key)[0]
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_gradient_that_cannot_be_written_is_refused_by_line(name: str) -> None:
    fn, problem = UNWRITTEN[name]
    model = from_torch(module_of(fn).float(), X.astype(np.float32))
    with pytest.raises(UserError, match=rf"inside forward, .*{problem}.*test_gradients_in_forward\.py"):
        model.source()


def test_a_parameter_without_gradient_is_frozen() -> None:
    module = module_of(lambda m, x: grad(m.net(x.requires_grad_()).sum(), x, create_graph=True)[0]).float()
    model = from_torch(module, X.astype(np.float32))
    assert [name for name in model.params if model.frozen(name)] == ["w", "net.2.bias", "norm.weight", "norm.bias"]


def test_a_wrong_operation_in_a_gradient_is_located() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return grad(m.net(x.requires_grad_()).sum(), x, create_graph=True)[0] ** 2

    wrong = {"aten.softplus.default": lambda x, *_: jax.nn.softplus(1.01 * x)}
    case = from_torch(module_of(forward).float(), X.astype(np.float32), ops=wrong).case()
    assert not check(case, steps=1).passed
    locate(case)


def backward(m: Any, x: Tensor) -> Any:
    (x * m.w).sum().backward()
    return x


def batched(m: Any, x: Tensor) -> Any:
    y = (x.requires_grad_() ** 2 * m.w).sum(0)
    return grad(y, x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)[0]


def changed_before(m: Any, x: Tensor) -> Any:
    y = (x * m.w).clone()
    h = y.view(-1)
    y.mul_(2)
    return grad((h**2).sum(), h, create_graph=True)[0]


def read_before(m: Any, x: Tensor) -> Any:
    h = (x * m.w).detach().requires_grad_()
    y = (h * m.w).sum()
    h.data.mul_(2)
    return grad(y + (h**2).sum(), h, create_graph=True)[0]


def not_used(m: Any, x: Tensor) -> Any:
    return grad((m.w**2).sum(), x.requires_grad_())[0]


def jacobians(m: Any, x: Tensor) -> Any:
    return torch.func.jacrev(lambda x: (x * m.w).sum(0))(x)


def nested(m: Any, x: Tensor) -> Any:
    return torch.func.vmap(lambda row: torch.func.grad(energies(m))(row) * row)(x)


@pytest.mark.parametrize(
    ("fn", "message", "line"),
    [
        (backward, "backward() inside forward", ".sum().backward()"),
        (batched, "several gradients at once", "is_grads_batched=True"),
        (changed_before, "changed in place before torch.autograd.grad", "y.mul_(2)"),
        (read_before, "modified by an inplace operation", "grad(y + (h**2).sum(), h"),
        (not_used, "appears to not have been used in the graph", "grad((m.w**2).sum()"),
        (nested, "torch.func.grad inside a function of torch.vmap", "torch.func.vmap(lambda row:"),
        (jacobians, "torch.func.vjp or jacrev inside forward", "torch.func.jacrev("),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(fn: Any, message: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        from_torch(module_of(fn), batch_of(4, 3))
    assert all(text in str(error.value) for text in (message, line, "test_gradients_in_forward.py:"))
