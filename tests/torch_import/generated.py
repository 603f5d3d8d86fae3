"""Modules of random statements, as text: layers, functions, closures, dicts, views, writes, randomness, dtypes, state.

A program is a list of draws (statement, operand, operand). Without some of them it still is one: failures shrink.
Every statement makes a tensor of the shape of the input, [4, 3], and takes earlier ones, or the ids, [4].
"""

import importlib.util
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from tests.torch_import.judge import judged

Draw = tuple[int, int, int]


class Statement(NamedTuple):
    """Text with {v}, the new tensor, {x} and {y}, earlier ones, {i}, the ids, and {n}, a number of its own.

    Attributes:
      forward: Lines of `forward`.
      init: Lines of `__init__`.
    """

    forward: str
    init: str = ""


PLAIN = [
    Statement("{v} = self.fc{n}({x})", "self.fc{n} = nn.Linear(3, 3)"),
    Statement("{v} = self.ln{n}({x} + {y})", "self.ln{n} = nn.LayerNorm(3)"),
    Statement("{v} = self.bn{n}({x})", "self.bn{n} = nn.BatchNorm1d(3)"),
    Statement("{v} = self.rnn{n}({x}, {y})", "self.rnn{n} = nn.GRUCell(3, 3)"),
    Statement("{v} = self.lstm{n}({x}[None])[0][0]", "self.lstm{n} = nn.LSTM(3, 3, batch_first=True)"),
    Statement(
        "{v} = self.att{n}({x}[None], {y}[None], {y}[None], need_weights=False)[0][0]",
        "self.att{n} = nn.MultiheadAttention(3, 1, batch_first=True)",
    ),
    Statement("{v} = self.conv{n}({x}.t()[None])[0].t()", "self.conv{n} = nn.Conv1d(3, 3, 3, padding=1)"),
    Statement("{v} = self.emb{n}({i}) * {x}", "self.emb{n} = nn.Embedding(5, 3)"),
    Statement("{v} = {x} * self.w{n} + {y}", "self.w{n} = nn.Parameter(torch.randn(3))"),
    Statement("{v} = F.gelu({x}) * torch.sigmoid({y})"),
    Statement("{v} = F.softmax({x}, dim=0) @ self.m{n}", "self.m{n} = nn.Parameter(torch.randn(3, 3))"),
    Statement("{v} = {x}.cumsum(0) / 4 - {y}.flip(1)"),
    Statement("{v} = {x}.sort(dim=0).values + {y}.roll(1, 0)"),
    Statement("{v} = torch.where({x} > {y}, {x}, 0.5 * {y})"),
    Statement("{v} = ({x} - {x}.mean(0)) / ({x}.std(0) + 0.1)"),
    Statement("{v} = {x} / {x}.norm(dim=-1, keepdim=True).clamp(min=0.1)"),
    Statement("{v} = torch.zeros_like({x}).scatter_add(0, {i}[:, None].expand(4, 3) % 4, {y})"),
    Statement("{v} = torch.zeros_like({x}).index_add_(0, {i} % 4, {y}) + {x}[{i} % 4]"),
    Statement("{v} = {x}.gather(1, {y}.argsort(1))"),
    Statement("{v} = torch.einsum('bi,ci,cj->bj', {x}, {y}, {x}) / 4"),
    Statement("a{n}, b{n} = torch.cat([{x}, {y}], 1).chunk(2, dim=1)\n{v} = a{n} - b{n}.abs()"),
    Statement("{v} = F.pad({x}, (1, 0))[:, :3] + F.pad({y}, (0, 1))[:, 1:]"),
    Statement("{v} = F.one_hot({i} % 3, 3).to({x}.dtype) * {x} + {y}.logsumexp(0)"),
    Statement("{v} = {x}.masked_fill({i}[:, None] > 2, 0.0) + {y}.max(dim=1, keepdim=True).values"),
    Statement("{v} = torch.fft.irfft(torch.fft.rfft({x}, dim=0), n=4, dim=0) * {y}"),
    Statement("{v} = torch.linalg.solve({x}.t() @ {x} + torch.eye(3, dtype={x}.dtype), {y}.t()).t()"),
    Statement("{v} = torch.stack([row * k for k, row in enumerate({x})]) + {y}"),
    Statement("{v} = {x}\nfor _ in range(2):\n    {v} = torch.tanh({v} + {y})"),
    Statement("{v} = torch.topk({x}, 3, dim=1).values + {y}.median(dim=0).values"),
]
CLOSURES = [
    Statement(
        "{v} = self.f{n}({x})",
        "self.c{n} = nn.Linear(3, 3)\nm{n} = self.c{n}\nself.f{n} = lambda z: F.relu(m{n}(z)) + z",
    ),
    Statement(
        "{v} = self.f{n}({x})",
        "self.w{n} = nn.Parameter(torch.randn(3))\nself.f{n} = lambda z, w=self.w{n}: z * w",
    ),
    Statement("{v} = self.f{n}({x})", "self.w{n} = nn.Parameter(torch.randn(3))\nself.f{n} = lambda z: z * self.w{n}"),
    Statement(
        "{v} = self.f{n}({x})", "self.w{n} = nn.Parameter(torch.randn(3))\nself.f{n} = partial(torch.mul, self.w{n})"
    ),
    Statement("{v} = self.d{n}['k']({x})", "self.c{n} = nn.Linear(3, 3)\nself.d{n} = {{'k': lambda z: self.c{n}(z)}}"),
    Statement("{v} = self.f{n}({x})", "self.c{n} = nn.Linear(3, 3)\nself.f{n} = self.c{n}.forward"),
    Statement("{v} = self.r{n}().c{n}({x})", "self.c{n} = nn.Linear(3, 3)\nself.r{n} = weakref.ref(self)"),
    Statement(
        "{v} = self.c{n}({x})",
        "self.c{n}, self.a{n} = nn.Linear(3, 3), nn.Linear(3, 3)\n"
        "self.c{n}.register_forward_hook(lambda module, args, out: out + self.a{n}(args[0]))",
    ),
    Statement(
        "{v} = self.c{n}({x})",
        "self.c{n}, self.a{n} = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))\nold{n} = self.c{n}.forward\n"
        "self.c{n}.forward = lambda z: old{n}(z) + z @ self.a{n}",
    ),
    Statement(
        "{v} = {x} @ self.w{n} + {y} @ self.s{n}",
        "self.w{n} = nn.Parameter(torch.randn(3, 3))\nself.s{n} = self.w{n}.data",
    ),
    Statement(
        "{v} = {x} * self.s{n} + {y} @ self.w{n}",
        "self.w{n} = nn.Parameter(torch.randn(3, 3))\nself.s{n} = self.w{n}[1].detach()",
    ),
    Statement("{v} = {x} + self.k{n}", "self.k{n} = torch.randn(4, 3)"),
    Statement("{v} = {x} + GLOBAL_TABLE"),
    Statement(
        "{v} = checkpoint(lambda z: torch.tanh(self.c{n}(z)) * {y}, {x}, use_reentrant=False)",
        "self.c{n} = nn.Linear(3, 3)",
    ),
]
STRUCTURE = [
    Statement("d{n} = {{'z': {x}, 'a': {y}}}\n{v} = torch.cat(list(d{n}.values()), 1)[:, 1:4]"),
    Statement("{v} = torch.cat([x * k for k, x in enumerate(features.values(), 1)], 1)[:, 2:5] + {x}"),
    Statement("{v} = features['zeta'] - features['alpha'] * {x}"),
]
WRITES = [
    Statement("{v} = {x}.clone()\n{v}[:, 0] = {y}[:, 1]\n{v} += 1"),
    Statement("{v} = {x} * 1\n{v}[1:].mul_({y}[:-1])"),
    Statement("{v} = {x} * 1\n{v}.t()[0] = 0"),
    Statement("{v} = {x} * 1\n{v}[{y} > 0] = 0.5"),
    Statement("{v} = {x} * 1\n{v}.view(-1)[::2] += {y}.reshape(-1)[1::2]"),
    Statement("{v} = torch.zeros_like({x})\nfor k in range(4):\n    {v}[k] = {y}[3 - k] * k"),
    Statement("t{n} = [{x}[k] for k in range(4)]\nt{n}[2].add_({y}[0]) if False else None\n{v} = torch.stack(t{n})"),
    Statement("{v} = {x} * 1\n{v}.clamp_(-1, 1).neg_()"),
]
GRADIENTS = [
    Statement("{v} = {x}.detach() * {y}"),
    Statement("with torch.no_grad():\n    g{n} = {x} * 2\n{v} = g{n} * {y}"),
    Statement("{v} = {x} + (torch.round({y}) - {y}).detach()"),
    Statement("{v} = Scaled.apply({x}, 0.3)"),
    Statement("{v} = {x} * 1\nif {v}.requires_grad:\n    {v}.register_hook(lambda g: g * 0.5)"),
    Statement(
        "{v} = torch.where({x} > 0, ({x} * self.w{n}).abs().sqrt(), 0.0 * {y})",
        "self.w{n} = nn.Parameter(torch.ones(3))",
    ),
]
STATE = [
    Statement(
        "self.b{n} = self.b{n} * 0.9 + {x}.detach().mean(0) * 0.1\n{v} = {x} - self.b{n}",
        "self.register_buffer('b{n}', torch.zeros(3))",
    ),
    Statement(
        "{v} = {x} * self.b{n}\nif self.training:\n    self.b{n}.mul_(0.9).add_({y}.detach()[0], alpha=0.1)",
        "self.register_buffer('b{n}', torch.ones(3))",
    ),
    Statement(
        "self.count{n} += 1\n{v} = {x} / self.count{n}",
        "self.register_buffer('count{n}', torch.zeros([], dtype=torch.long))",
    ),
    Statement("self.calls{n} += 1\n{v} = {x} + 1", "self.calls{n} = 0"),
    Statement("self.calls{n} += 1\n{v} = {x} / self.calls{n}", "self.calls{n} = 1"),
    Statement("self.last{n} = {x}\n{v} = self.last{n} * {y}"),
    Statement("{v} = {x} + (0 if self.h{n} is None else self.h{n})\nself.h{n} = {y}.detach()", "self.h{n} = None"),
]
NUMBERS = [
    Statement("{v} = self.e{n}(({i} + 1) * 1000003 % 5) + {x}", "self.e{n} = nn.Embedding(5, 3)"),
    Statement("{v} = self.e{n}(({i} + 7) * 1_700_000_000_000 // 1000 % 5) * {x}", "self.e{n} = nn.Embedding(5, 3)"),
    Statement("{v} = {x} + ({i}.double() * 1e-3 + 6378137.0 - 6378137.0).to({x}.dtype)[:, None]"),
    Statement("{v} = (({x}.double() + 1e6) - 1e6).to({x}.dtype)"),
    Statement("{v} = {x} * ({i} / 3)[:, None] + ({i} // 2)[:, None]"),
    Statement("{v} = {x} * ({i}.to(torch.int32) * 70000 % 97)[:, None] / 97"),
    Statement("{v} = {x} + (({i}[:, None] << 40) >> 38) * 0.01"),
    Statement("{v} = torch.view_as_real(torch.polar({x}.abs(), {y})).sum(-1)"),
    Statement("{v} = ({x} * self.z{n}).abs()", "self.z{n} = nn.Parameter(torch.view_as_complex(torch.randn(3, 2)))"),
]
RANDOM = [
    Statement("{v} = self.drop{n}({x})", "self.drop{n} = nn.Dropout(0.5)"),
    Statement("{v} = {x} + torch.rand_like({x}) if self.training else {x}"),
    Statement("{v} = F.dropout({x}, 0.5, training=True)"),
    Statement("{v} = {x} * np.random.beta(1.0, 1.0)"),
    Statement("{v} = {x} * random.uniform(0.5, 1.0)"),
    Statement("{v} = {x} * float(self.g{n}.normal())", "self.g{n} = np.random.default_rng(0)"),
    Statement("torch.manual_seed(0)\n{v} = {x} @ torch.randn(3, 3)"),
    Statement("{v} = {x} * time.perf_counter() % 1"),
]
BRANCHES = [
    Statement("{v} = {x} if {x}.shape[0] > 2 else {y}"),
    Statement("{v} = {x} if float({y}.sum()) > 0 else {y}"),
    Statement("try:\n    s{n} = 1 / float({x}.abs().max() + 1)\nexcept Exception:\n    s{n} = 1.0\n{v} = {x} * s{n}"),
    Statement("{v} = {x} if torch.compiler.is_compiling() or torch.jit.is_tracing() else {x}.clamp(-0.5, 0.5)"),
    Statement("{v} = {x} / {x}.abs().max().item()"),
    Statement("{v} = {x} + {x}[{i} > 1].mean()"),
    Statement("{v} = {x} + {y}[~torch.eye(4, 3, dtype=torch.bool)].view(4, 2)[:, :1]"),
    Statement("assert {x}.isfinite().all()\n{v} = {x} + 1"),
    Statement("{v} = {x} + 1 if hasattr({x}, 'fake_mode') else {x} - 1"),
]
STATEMENTS: list[Statement] = [
    *PLAIN, *CLOSURES, *STRUCTURE, *WRITES, *GRADIENTS, *STATE, *NUMBERS, *RANDOM, *BRANCHES
]  # fmt: skip
TEMPLATE = """
import random
import time
import weakref
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

GLOBAL_TABLE = torch.linspace(-1, 1, 3)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x < 0, torch.zeros_like(g), g) * ctx.scale, None


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, ids, **features):
        x0 = features["alpha"]
        x1 = features["zeta"]
        {forward}
        return {{"y": {results}, "last": {last}}}
"""


def source(draws: Sequence[Draw]) -> str:
    """Return the text of a program."""
    init, forward, values = ["self.fc = nn.Linear(3, 3)"], ["x1 = self.fc(x1)"], ["x0", "x1"]
    for n, (statement, a, b) in enumerate(draws):
        chosen = STATEMENTS[statement % len(STATEMENTS)]
        # Mostly the latest values, so that statements compose.
        words = {
            "v": f"v{n}",
            "x": values[-1 - a % min(len(values), 3)],
            "y": values[-1 - b % len(values)],
            "i": "ids",
            "n": n,
        }
        forward += chosen.forward.format(**words).split("\n")
        init += chosen.init.format(**words).split("\n") if chosen.init else []
        values.append(f"v{n}")
    indented = "\n        ".join
    return TEMPLATE.format(
        init=indented(init), forward=indented(forward), results=" + ".join(values[-2:]), last=values[-1]
    )


def example() -> dict[str, np.ndarray]:
    """Return a batch; its names are not in the order of the alphabet."""
    rng = np.random.default_rng(0)
    return {
        "ids": np.array([3, 0, 4, 1]),
        "zeta": rng.standard_normal((4, 3)).astype(np.float32),
        "alpha": rng.standard_normal((4, 3)).astype(np.float32),
    }


def outcome(draws: Sequence[Draw], folder: Path, *, train: bool, dtype: torch.dtype) -> str:
    """Return what became of a program, as `judged` does; "crash: …" of another error than a refusal."""
    text = source(draws)
    path = folder / f"program_{abs(hash(text))}.py"
    path.write_text(text)

    def made() -> tuple[torch.nn.Module, Any]:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        return module.Module().train(train), example()

    try:
        found = judged(made, dtype=dtype)
    except Exception as error:
        return f"crash: {type(error).__name__}: {str(error)[:200]}"
    finally:
        path.unlink()
    if found.startswith("refused") and "program_" not in found:
        return f"without a line: {found}"
    return found


def failed(found: str) -> bool:
    """Return whether an outcome is one that may not be."""
    return not found.startswith(("proved", "refused", "invalid"))


def shrunk(draws: list[Draw], folder: Path, **settings: Any) -> list[Draw]:
    """Return a failing program from which no statement can be left out."""
    for n in reversed(range(len(draws))):
        fewer = draws[:n] + draws[n + 1 :]
        if fewer and failed(outcome(fewer, folder, **settings)):
            draws = fewer
    return draws


def valid(draws: Sequence[Draw], *, train: bool) -> bool:
    """Return whether PyTorch's side has one answer, as it has not where it draws random numbers in training."""
    return not (train and any(STATEMENTS[draw[0] % len(STATEMENTS)] in RANDOM[:3] for draw in draws))


def drawn(rng: random.Random) -> Draw:
    return rng.randrange(10**6), rng.randrange(10**6), rng.randrange(10**6)


def main(count: int, seed: int) -> None:
    """Try programs, and print those that failed, shrunk."""
    # A fifth of the time is compilation, of functions that many programs have in common.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    rng, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for k in range(count):
            draws = [
                (rng.randrange(10**6), rng.randrange(10**6), rng.randrange(10**6)) for _ in range(rng.randint(1, 6))
            ]
            train = rng.random() < 0.5
            settings = {"train": train, "dtype": rng.choice([torch.float64, torch.float32])}
            if not valid(draws, train=train):
                counts["random"] += 1
                continue
            found = outcome(draws, Path(folder), **settings)
            counts[found.split(":")[0]] += 1
            if failed(found):
                smallest = shrunk(draws, Path(folder), **settings)
                print(f"\n#{k} {settings}\n{outcome(smallest, Path(folder), **settings)[:300]}")
                body = source(smallest).split("class Module(nn.Module):")[1]
                print(body.strip("\n"), flush=True)
            if k % 50 == 49:
                print(k + 1, dict(counts), flush=True)
    print(count, dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
