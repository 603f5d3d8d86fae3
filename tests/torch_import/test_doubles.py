"""float64 inside modules of float32: PyTorch's numbers, or refused with the line."""

import copy
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.source.emit import loaded
from tests.torch_import.reference import Function, weighted

Tensor = torch.Tensor
STEPS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda v: 1e8 + v - 1e8,
    lambda v: v * 1e-9 + 1 - 1e-10,
    lambda v: v / 3,
    lambda v: v.cumsum(-1),
    lambda v: v - v.mean(-1, keepdim=True),
    lambda v: (v * 1e5).sin(),
    lambda v: v**2 + 1e7,
    lambda v: v * torch.arange(6, dtype=torch.float64) * 0.1,
    lambda v: v * torch.linspace(0, 1, 6, dtype=torch.float64).exp(),
    lambda v: torch.where(v > 0.3, v, v * 1e6 + 0.1),
    lambda v: torch.cat([v, v.flip(-1)], -1)[..., 3:9],
    lambda v: v.clamp(-1e9, 1e9) + 0.1,
    lambda v: torch.stack([v, v + 1e8]).sum(0) - 1e8,
    lambda v: v.to(torch.float64) * torch.tensor(0.1, dtype=torch.float64),
    lambda v: torch.outer(v[0], torch.arange(6).double()).sum(0).expand(4, 6) % 1,
    # Not 0 at the maximum, from where one rounding may lead to either side of a multiple of 7.
    lambda v: v.max(-1, keepdim=True).values - v + 0.5,
)
READ: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda v: v.float(),
    lambda v: (v % 7).float(),
    lambda v: (v * 1000).long() % 50,
    lambda v: v.to(torch.float32).cos(),
    lambda v: (v - v.floor()).float(),
    lambda v: (v > 0.5).float(),
    lambda v: v.argmax(-1, keepdim=True),
)


class Programs(nn.Module):
    """Random programs of float64, each from one source, in a module of float32."""

    SOURCES = ("ids", "x", "buffer", "constant", "weight")

    def __init__(self, seed: int, sources: tuple[str, ...], *, smooth: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.noise = 0.0
        self.weight = nn.Parameter(torch.rand(4, 6) + 0.1)
        self.register_buffer("buffer", torch.rand(4, 6, dtype=torch.float64))
        self.constant = torch.rand(4, 6, dtype=torch.float64) * 1e4
        self.programs = [(sources[i % len(sources)], [draw.getrandbits(20) for _ in range(4)]) for i in range(6)]
        self.steps, self.read = (STEPS[:5], READ[:1]) if smooth else (STEPS, READ)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for source, drawn in self.programs:
            value = {"ids": ids, "x": x}.get(source)
            value = (getattr(self, source) if value is None else value).double()
            for number in drawn[:-1]:
                value = self.steps[number % len(self.steps)](value)
                if self.noise:
                    value = value * (1 + self.noise * torch.randn_like(value))
            found.append(self.read[drawn[-1] % len(self.read)](value) * self.weight)
        return tuple(found)


def expected_of(module: Programs) -> list[tuple[Tensor, np.ndarray]]:
    """Return PyTorch's results, each with what a few units in the last place of float64 at each step change."""
    batch = [*map(torch.tensor, BATCH.values())]
    expected = module(*batch)
    module.noise = 2e-15
    noisy = [module(*batch) for _ in range(4)]
    module.noise = 0.0
    bounds = [sum((y - x[i]).detach().abs().double() for x in noisy).numpy() for i, y in enumerate(expected)]
    return list(zip(expected, bounds, strict=True))


def differs(ours: Any, theirs: Tensor, bound: np.ndarray) -> bool:
    """Return whether results differ by more than float32's rounding and a bound."""
    wanted = theirs.detach().double().numpy()
    bound = 5e-7 * np.abs(wanted) + 4 * bound + 1e-13 * np.abs(wanted).max()
    return bool((np.abs(np.asarray(ours, np.float64) - wanted) > bound).any())


RNG = np.random.default_rng(0)
BATCH = {"ids": RNG.integers(0, 10**9, (4, 6)), "x": RNG.uniform(0, 1e3, (4, 6)).astype(np.float32)}


@pytest.mark.parametrize("seed", range(40))
def test_float64_without_a_gradient_is_pytorchs(seed: int, tmp_path: Any) -> None:
    torch.manual_seed(seed)
    module = Programs(seed, Programs.SOURCES[: 2 + 2 * (seed % 3 > 0)])
    expected = expected_of(module)
    model = from_torch(module, BATCH)
    model.save(tmp_path / "saved")
    again = load_imported(tmp_path / "saved")
    for fn in (model, again, loaded(*model.written())):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            found, _ = jax.jit(lambda params, batch, fn=fn: fn(params, batch))(model.params, BATCH)
        for program, ours, theirs in zip(module.programs, found, expected, strict=True):
            assert not differs(ours, *theirs), program


@pytest.mark.parametrize("seed", range(20))
def test_float64_with_a_gradient_is_refused_by_line_or_computed_in_x64_mode(seed: int) -> None:
    torch.manual_seed(seed)
    module = Programs(seed, ("weight", "x"), smooth=True)
    with pytest.raises(
        UserError, match=r"^float64 in a gradient.*\(.*test_doubles.py:\d+: .*jax_enable_x64.*\.float\(\)"
    ):
        from_torch(module, BATCH)
    expected = expected_of(theirs := copy.deepcopy(module))
    weighted([y for y, _ in expected], torch).backward()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = from_torch(module, BATCH)

        def run(params: Any) -> Any:
            outputs, _ = model(params, BATCH)
            return weighted(outputs, jnp), outputs

        (_, found), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(model.params)
        found, grads = jax.device_get((found, grads))
    for ours, (y, bound) in zip(found, expected, strict=True):
        assert ours.dtype.name == str(y.dtype).removeprefix("torch.")
        assert not differs(ours, y, bound)
    gradient = theirs.weight.grad.numpy()
    np.testing.assert_allclose(grads["weight"], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max())
    with pytest.raises(UserError, match="float64 in a gradient"):
        model({"weight": np.ones((4, 6), np.float32)}, BATCH)


def with_buffer(name: str, x: Tensor) -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer(name, x)
    return module


class Counting(nn.Module):
    """A buffer of float64 that each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        return self.linear(x)


def test_parameters_and_changing_buffers_of_float64_are_refused_by_name() -> None:
    x = np.ones((2, 3), np.float32)
    remedy = r"jax_enable_x64.*module\.float\(\)"
    for module, name in (
        (nn.Linear(3, 3).double(), "parameter 'weight' is float64"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()), "parameter '1.weight' is float64"),
        (Function(lambda self, x: x * self.w), "'w' is float64"),
        (Counting(), "buffer 'total' changes and is float64"),
    ):
        with pytest.raises(UserError, match=f"{name}.*{remedy}"):
            from_torch(module, x)
    unread = from_torch(with_buffer("unread", torch.full((3,), 1 / 3, dtype=torch.float64)), x)
    assert float(unread.to_torch().get_buffer("unread")[0]) == 1 / 3


def test_examples_in_float64_are_those_that_pytorch_rounds_or_refuses_or_refused_by_line() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3))
    for module in (nn.Linear(3, 3), Function(lambda self, x: x.reshape(3, 2).float() @ self.w[:2]).float()):
        theirs = module(torch.tensor(x, dtype=torch.float32)).detach().numpy()
        model = from_torch(module, x)
        np.testing.assert_allclose(model(model.params, x)[0], theirs, atol=1e-6)
    module = Function(lambda self, x: (1e8 + x - 1e8).float() * self.w).float()
    for example in (x, torch.tensor(x)):
        with pytest.raises(UserError, match=r"the example batch is float64.*\(.*test_doubles.py:\d+: .*float32 arrays"):
            from_torch(module, example)
    with jax.enable_x64(True):
        model = from_torch(module, x)
        theirs = module(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(model(model.params, x)[0], theirs, rtol=1e-6)


def test_a_module_of_float64_trains_in_float64_alone() -> None:
    x = np.ones((2, 3))
    with jax.enable_x64(True):
        module = nn.Linear(3, 1).double()
        model = from_torch(module, x)
        loss_fn = model.loss(lambda y, batch: jt.Loss.of(y**2))
        step = jt.train_step(loss_fn, jt.optim.sgd(0.1), precision="fp64")
        _, metrics = step(step.init(model.params), x)
        expected = (module(torch.tensor(x)) ** 2).mean()
        np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=1e-14)
        step = jt.train_step(loss_fn, jt.optim.sgd(0.1))
        with pytest.raises(UserError, match=r'parameters are float64.*those given are float32.*precision="fp64"'):
            step(step.init(model.params), x)
