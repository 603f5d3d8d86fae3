"""Integers of imported modules are PyTorch's int64, or refused in one line."""

import contextlib
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import jaxtrain as jt
from jaxtrain import UserError
from jaxtrain.torch_import import from_torch, load_imported
from jaxtrain.torch_import.graph import Dtype, Graph, Input, Node, Ref, Spec
from jaxtrain.torch_import.integer_ranges import ranges_of
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
    text, _ = model.written()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        written, _ = jax.jit(lambda batch: loaded(text, {})({}, batch))({"ids": IDS})
    for values in (found, written):
        for i, (ours, theirs) in enumerate(zip(jax.device_get(values), expected, strict=True)):
            if theirs.dtype.kind == "f":
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=str(module.programs[i]))
            else:
                np.testing.assert_array_equal(ours, theirs, err_msg=str(module.programs[i]))


OTHERS: tuple[Callable[[Tensor, Tensor, int], Any], ...] = (
    lambda x, y, n: x // torch.where(y == 0, 1, y),
    lambda x, y, n: torch.div(x, torch.where(y == 0, 1, y), rounding_mode="trunc"),
    lambda x, y, n: x % torch.where(y == 0, 1, y),
    lambda x, y, n: torch.fmod(x, torch.where(y == 0, 1, y)),
    lambda x, y, n: n % x,
    lambda x, y, n: x | y,
    lambda x, y, n: ~(x | n),
    lambda x, y, n: x << y,
    lambda x, y, n: x >> y,
    lambda x, y, n: (torch.bitwise_left_shift(x, n), torch.bitwise_right_shift(x, y)),
    lambda x, y, n: x**n,
    lambda x, y, n: n**y,
    lambda x, y, n: x**y,
    lambda x, y, n: x.square(),
    lambda x, y, n: torch.sub(x, y, alpha=n),
    lambda x, y, n: torch.rsub(x, y, alpha=n),
    lambda x, y, n: torch.rsub(x, n),
    lambda x, y, n: x.sum(),
    lambda x, y, n: x.sum((0, 1)),
    lambda x, y, n: (x > n).sum(1),
    lambda x, y, n: x.cumsum(0),
    lambda x, y, n: x.sign(),
    lambda x, y, n: x.clamp(n),
    lambda x, y, n: x.clamp(n, n + 3),
    lambda x, y, n: x.clamp(y, y + n),
    lambda x, y, n: x.clamp_min(y),
    lambda x, y, n: x.clamp_max(y),
    lambda x, y, n: x.clamp_max(n),
    lambda x, y, n: torch.arange(n),
    lambda x, y, n: torch.arange(n, 5),
    lambda x, y, n: torch.arange(5, n, -2),
    lambda x, y, n: torch.full_like(x, n) + torch.ones_like(x) + x.new_full((8,), n) + x.new_zeros(8),
    lambda x, y, n: torch.eye(3, dtype=torch.int64) + torch.scalar_tensor(n, dtype=torch.int64),
    lambda x, y, n: torch.randint(n, (5,)),
    lambda x, y, n: torch.randint(n, 5, (5,)),
    lambda x, y, n: F.pad(x, (1, 1), value=n),
    lambda x, y, n: F.pad(x, (1, 1), mode="replicate"),
    lambda x, y, n: torch.diag_embed(x),
    lambda x, y, n: x.tril(),
    lambda x, y, n: x.repeat_interleave(y[0], dim=1),
    lambda x, y, n: x.masked_fill(x > y, y[0, 0]),
    lambda x, y, n: torch.where(x > n, n, 7),
    lambda x, y, n: torch.where(x > n, n, y),
    lambda x, y, n: x.fill_(n),
    lambda x, y, n: x.copy_(y),
    lambda x, y, n: x.copy_(y / 3.0),
    lambda x, y, n: torch.cat([x, y]),
    lambda x, y, n: torch.stack([x, y]),
    lambda x, y, n: x.scatter(1, y.abs() % 8, n),
    lambda x, y, n: x.scatter(1, y.abs() % 8, y),
    lambda x, y, n: x.index_fill(0, y[0].abs() % 4, n),
    lambda x, y, n: x.index_copy(0, torch.arange(4), y),
    lambda x, y, n: x.masked_scatter(x > n, y),
    lambda x, y, n: x.slice_scatter(y[:2], 0, 0, 2),
    lambda x, y, n: x.select_scatter(y[0], 0, 0),
    lambda x, y, n: x.diagonal_scatter(y[0, :4]),
    lambda x, y, n: (x[y.abs() % 4], x.take(y.abs() % 32), F.embedding(y.abs() % 4, x)),
    lambda x, y, n: (x.topk(2), x.median(1), x.mode(1), x.kthvalue(2), x.cummax(1), x.cummin(1), x.amin(0)),
    lambda x, y, n: (x.unbind(), x.split(3, 1), x.argsort(1), x.argmax(1)),
    lambda x, y, n: (x.to(torch.int8), (x * 100).to(torch.int8), (x * 100).to(torch.uint8), x.type_as(y.int())),
    lambda x, y, n: x.to(torch.int8) * y.to(torch.int8) * 20,
)


class Calls(TorchDispatchMode):
    """Records operations as nodes of a graph, with the values of their operands and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Node, dict[str, np.ndarray], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands: dict[str, np.ndarray] = {}

        def written(x: Any) -> Any:
            if isinstance(x, Tensor):
                operands[f"x{len(operands)}"] = x.numpy().copy()
                return Ref(f"x{len(operands) - 1}")
            if isinstance(x, torch.dtype):
                return Dtype(str(x).removeprefix("torch."))
            return tuple(map(written, x)) if isinstance(x, list | tuple) else x

        args_, kwargs_ = written(args), {key: written(x) for key, x in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        spec = tuple(map(spec_of, result)) if isinstance(result, list | tuple) else spec_of(result)
        self.found.append((Node("y", str(func).replace("_.", "."), args_, kwargs_, spec), operands, result))
        return result


def spec_of(x: Any) -> Spec | None:
    return Spec((*x.shape,), str(x.dtype).removeprefix("torch.")) if isinstance(x, Tensor | np.ndarray) else None


def test_the_results_of_an_operation_are_within_its_range() -> None:
    rng = np.random.default_rng(0)
    every = [lambda x, y, n, fn=fn: fn(x, n) for fn in UNARY] + [lambda x, y, n, fn=fn: fn(x, y) for fn in BINARY]
    # A range may be wider than the values by some.
    sizes = ((6, 6, 0), (6, 6, 0), (6, 6, 1), (100, 6, 1), (100, 100, 0), (2**40, 6, 0))
    for fn, (*largest, wider) in product((*every, *OTHERS), sizes):
        ends = (np.sort(rng.integers(-size, size + 1, 2)) for size in largest)
        x, y = (torch.tensor(rng.integers(low, high, (4, 8), endpoint=True)) for low, high in ends)
        # PyTorch refuses a division by zero, a negative power, or an empty range.
        with contextlib.suppress(RuntimeError), Calls() as calls:
            fn(x, y, int(y[0, 0]))
        for node, operands, result in calls.found:
            constants = {name: np.append(v, [v.min() - wider, v.max() + wider]) for name, v in operands.items()}
            inputs = (Input(name, "constant", name, spec_of(v)) for name, v in operands.items())
            ranges = ranges_of(Graph((*inputs,), (node,), (), {}), constants)["y"]
            several = isinstance(result, list | tuple)
            for values, found in zip(result if several else [result], ranges if several else [ranges], strict=True):
                values = np.asarray(values)
                assert (found is None) == (values.dtype.kind == "f"), node
                if found is not None and values.size:
                    assert found[0] <= values.min() <= values.max() <= found[1], (node, constants, values, found)


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
    def __init__(self, start: int, most: int) -> None:
        super().__init__()
        self.most = most
        self.register_buffer("seen", torch.tensor(start))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += (ids % self.most).sum()
        return ids


def test_what_cannot_hold_64_bits_is_refused() -> None:
    ids = np.arange(4)
    with pytest.raises(UserError, match=r"buffer 'seen' may hold integers beyond int32.*test_integers\.py:\d+"):
        from_torch(Counted(0, 2**27), ids)
    from_torch(Counted(0, 9), ids)  # counts
    with pytest.raises(UserError, match="buffer 'seen' changes and holds integers beyond int32"):
        from_torch(Counted(2**40, 9), ids)
    with pytest.raises(UserError, match=r"the batch\['input'\] has the integer 1700000000000, beyond int32"):
        from_torch(nn.Identity(), {"input": np.array([3, 1700000000000])})
    hashed = Function(lambda self, x: x * self.table[0])
    hashed.table = nn.ParameterList([nn.Parameter(torch.tensor([3, 2**40]), requires_grad=False)])
    with pytest.raises(UserError, match=r"the parameter\['table.0'\] has the integer 1099511627776, beyond int32"):
        from_torch(hashed.float(), ids[:2])
    model = from_torch(nn.Identity(), {"input": np.arange(2)})
    with pytest.raises(UserError, match="beyond int32"):
        model({}, {"input": np.array([0, -(2**33)])})
