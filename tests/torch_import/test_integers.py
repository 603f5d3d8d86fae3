"""Integers of imported modules are PyTorch's int64, or refused in one line."""

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.source.emit import loaded
from tests.torch_import.reference import Function

Tensor = torch.Tensor
LARGE = (3, 31, 1000003, 2654435761, 2**31, -(2**31) - 1, 2**40 + 7, 0x1E3779B97F4A7C15)
UNARY: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, n: x * n,
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x - n,
    lambda x, n: torch.add(x, x.flip(0), alpha=n),
    lambda x, n: -x,
    lambda x, n: x.abs(),
    lambda x, n: x**3,
    lambda x, n: x << (n % 40),
    lambda x, n: x >> (n % 40),
    lambda x, n: x ^ (x >> 7),
    lambda x, n: x & n,
    lambda x, n: x | n,
    lambda x, n: ~x,
    lambda x, n: x % n,
    lambda x, n: torch.fmod(x, n),
    lambda x, n: x // n,
    lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    lambda x, n: x.cumsum(-1),
    lambda x, n: x.sum(0, keepdim=True) + x,
    lambda x, n: x.clamp(max=n),
    lambda x, n: torch.where(x > n, x, n),
    lambda x, n: x.masked_fill(x % 3 == 0, n),
    lambda x, n: torch.roll(x, 1, -1),
    lambda x, n: x.flip(0).contiguous(),
    lambda x, n: x.sort(-1)[0],
    lambda x, n: x.max(-1, keepdim=True)[0] - x,
    lambda x, n: x + torch.arange(8) * n,
    lambda x, n: x + torch.full((8,), n),
    lambda x, n: (x % 1000).double().mul(1e3).long() * n,
    lambda x, n: x.gather(-1, (x % 8 + 8) % 8),
    lambda x, n: torch.zeros_like(x).scatter(-1, torch.arange(8).expand(4, 8), x),
    lambda x, n: torch.stack([x, x * n]).sum(0),
    lambda x, n: x @ torch.eye(8, dtype=torch.int64),
    lambda x, n: x.to(torch.int32).long(),
    lambda x, n: x.to(torch.bool).long() + x,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x * y,
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x ^ y,
    lambda x, y: x & y,
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x > y, x, y * 5),
)
READ: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, n: x % 50,
    lambda x, n: x,
    lambda x, n: x > n,
    lambda x, n: x.float() / 7,
    lambda x, n: x / n,
    lambda x, n: x.argmax(-1),
    lambda x, n: x.sum() % 1009,
    lambda x, n: (x == n).any(),
    lambda x, n: nn.functional.one_hot((x % 5 + 5) % 5, 5),
    lambda x, n: torch.arange(50.0)[(x % 50 + 50) % 50],
)


class Programs(nn.Module):
    """Random programs of integers, each of a few operations."""

    def __init__(self, seed: int, count: int = 10) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.programs = [[draw.getrandbits(30) for _ in range(9)] for _ in range(count)]
        self.register_buffer("factors", torch.tensor([1000003, 2654435761, 2**45 + 1, 5] * 2), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.run(ids, program) for program in self.programs)

    def run(self, ids: Tensor, program: list[int]) -> Tensor:
        values = [ids, ids * self.factors] if program[0] % 4 == 0 else [ids]
        for drawn in program[1:-1]:
            number = LARGE[drawn // 64 % len(LARGE)]
            x, y = values[drawn % len(values)], values[-1]
            chosen = drawn // 1024 % (len(UNARY) + len(BINARY))
            values.append(UNARY[chosen](x, number) if chosen < len(UNARY) else BINARY[chosen - len(UNARY)](x, y))
            if len(values) > 4 and drawn % 3 == 0:
                break
        return READ[program[-1] % len(READ)](values[-1], LARGE[program[-1] // 64 % len(LARGE)])


IDS = np.random.default_rng(0).integers(-50000, 50000, (4, 8))


@pytest.mark.parametrize("seed", range(40))
def test_integers_are_those_of_int64(seed: int) -> None:
    module = Programs(seed)
    expected = [y.numpy() for y in module(torch.tensor(IDS))]
    model = from_torch(module, {"ids": IDS})
    found, _ = jax.jit(lambda batch: model({}, batch))({"ids": IDS})
    text, _ = model._source()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        written, _ = jax.jit(lambda batch: loaded(text, {})({}, batch))({"ids": IDS})
    for values in (found, written):
        for i, (ours, theirs) in enumerate(zip(jax.device_get(values), expected, strict=True)):
            if theirs.dtype.kind == "f":
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=str(module.programs[i]))
            else:
                np.testing.assert_array_equal(ours, theirs, err_msg=str(module.programs[i]))


class Few(nn.Module):
    """One operation that needs 64 bits."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "product":
            return x * x % 50
        if self.which == "comparison":
            return x + (x > 2**40)
        return x * 1000003 % 50 if x.sum() > 0 else x % 50


def test_one_operation_that_needs_64_bits_has_them() -> None:
    """A product without a large factor, a large number without a large result, and a part of a graph."""
    for which in ("product", "comparison", "branch"):
        module, x = Few(which), abs(IDS[0])
        found, _ = from_torch(module, x)({}, x)
        np.testing.assert_array_equal(found, module(torch.tensor(x)), err_msg=which)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(64, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, hashed: Tensor) -> Tensor:
        return torch.relu(self.linear(x + self.table(hashed % 64)))


class Hashed(nn.Module):
    """Embeddings by hashes, also in repeated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.register_buffer("factors", torch.tensor([1000003, 2654435761]), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hashed = ids * 1000003 + 1
        x = self.table((ids[..., None] * self.factors).sum(-1) % 50)
        for layer in self.layers:
            x = layer(x, hashed)
        return x


def test_hashes_survive_a_loop_a_folder_and_training(tmp_path: Any) -> None:
    module, batch = Hashed(), {"ids": IDS.astype(np.int32)}
    expected = module(torch.tensor(IDS)).detach().numpy()
    model = from_torch(module, batch)
    assert any(node.op == "jaxtrain.repeat.default" for node in model.graph.nodes)
    model.save(tmp_path / "saved")
    for run in (model, load_imported(tmp_path / "saved")):
        np.testing.assert_allclose(run(model.params, batch)[0], expected, atol=1e-6)
    loss_fn = model.loss(lambda y, batch: jt.Loss.of(y**2))
    step = jt.train_step(loss_fn, optax.sgd(0.1), precision="bf16", remat="full")
    _, metrics = step(step.init(model.params), batch)
    np.testing.assert_allclose(metrics["loss"], (expected**2).mean(), rtol=1e-2)


class Counted(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(start))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.sum() if not self.seen.ndim else 1
        return ids


def test_what_cannot_hold_64_bits_is_refused() -> None:
    ids = np.arange(4)
    with pytest.raises(UserError, match=r"buffer 'seen' may hold integers beyond int32.*test_integers\.py:\d+"):
        from_torch(Counted(0), ids)
    with pytest.raises(UserError, match="buffer 'seen' changes and holds integers beyond int32"):
        from_torch(Counted(2**40), ids)
    with pytest.raises(UserError, match=r"the batch\['input'\] has the integer 1700000000000, beyond int32"):
        from_torch(nn.Identity(), {"input": np.array([3, 1700000000000])})
    hashed = Function(lambda self, x: x * self.table[0])
    hashed.table = nn.ParameterList([nn.Parameter(torch.tensor([3, 2**40]), requires_grad=False)])
    with pytest.raises(UserError, match=r"the parameter\['table.0'\] has the integer 1099511627776, beyond int32"):
        from_torch(hashed.float(), ids[:2])
    model = from_torch(nn.Identity(), {"input": np.arange(2)})
    with pytest.raises(UserError, match="beyond int32"):
        model({}, {"input": np.array([0, -(2**33)])})
