"""Tensors that forward computes from constants alone have their values: shapes, indices and Python numbers of them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.reference import Function, batch_of, compared

Tensor = torch.Tensor
N = 3


def written_by_view(x: Tensor) -> Tensor:
    mask = torch.zeros(N, N, dtype=torch.bool)
    row = mask[1]
    row[1:] = True
    mask[0, 0] = True
    row.logical_not_()
    return mask


def swapped(x: Tensor) -> Tensor:
    mask = torch.ones(N, N).tril().bool()
    mask.t_()
    return mask.clone().fill_diagonal_(False) if mask.shape == (N, N) else mask


def listed(x: Tensor) -> Tensor:
    return torch.tensor([[i != j and i + j != 2 for i in range(N)] for j in range(N)])


def of_numpy(x: Tensor) -> Tensor:
    return torch.tensor(np.tri(N, k=-1)) > 0


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "off the diagonal": lambda x: ~torch.eye(len(x), dtype=torch.bool),
    "causal": lambda x: torch.ones(N, N).tril() == 1,
    "window": lambda x: (torch.arange(N)[:, None] - torch.arange(N)[None]).abs() <= 1,
    "like the input": lambda x: torch.ones_like(x).triu(1).bool(),
    "new": lambda x: x.new_full((N, N), 2).cumsum(0) > x.new_zeros(N) + 3,
    "list": listed,
    "NumPy": of_numpy,
    "written by views": written_by_view,
    "labels": lambda x: torch.cat([torch.arange(2), torch.zeros(1)])[:, None].eq(torch.tensor([0.0, 1.0, 1.0])),
    "all": lambda x: torch.full((N, N), True),
    "none": lambda x: torch.linspace(0, 1, N * N).view(N, N) > 1,
}


def results(y: Tensor, mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the ways in which a shape, an index or a number depends on a mask."""
    rows, columns = torch.where(mask)
    places, counts = mask.nonzero(), mask.sum(1)
    changed, added = y.clone(), y.clone()
    changed[mask] = y.flatten()[: len(places)] * 2
    added[mask] += 1
    sizes = [*counts.tolist(), N * N - len(places)]
    return {
        "read": lambda: y[mask],
        "read of the second axis": lambda: y[:, mask[0]],
        "read of three axes": lambda: torch.stack([y, -y])[:, mask],
        "masked_select": lambda: y.masked_select(mask),
        "rows": lambda: y[rows] - y[columns],
        "added back": lambda: torch.zeros_like(y).index_add_(0, rows, y[columns]),
        "places": lambda: y[places[:, 0], places[:, 1]],
        "written": lambda: changed,
        "added": lambda: added,
        "repeated": lambda: y.repeat_interleave(counts, 0),
        "one-hot": lambda: F.one_hot(counts).to(y) * y.sum(),
        "bincount": lambda: torch.bincount(counts, minlength=2) * y.mean(),
        "unique": lambda: counts.unique() * y.mean(),
        "number": lambda: y * int(counts.max()) + float(mask.float().mean()) * y[:, : int(counts[0])].sum(),
        "branch": lambda: y.exp() if mask.any() else y.sin(),
        "list": lambda: sum((n * y[i] for i, n in enumerate(counts.tolist())), y[0]),
        "split": lambda: torch.cat([part.cumsum(0) for part in y.repeat(3, 1).split(sizes)]),
        "loop": lambda: sum((y[i, j] for i, j in places), y[0, 0]),
    }


def uses(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return tuple(result() for result in results(x * self.w, mask).values())


@pytest.mark.parametrize("name", MASKS)
def test_constants_have_their_values(name: str) -> None:
    differences, _ = compared(Function(lambda self, x: uses(self, x, MASKS[name](x))), batch_of(N, N), train=False)
    assert max(differences) < 1e-12


def by_value(mask: Tensor, x: Tensor) -> Tensor:
    mask[0, 0] = x[0, 0] > 0
    return mask


def by_view(mask: Tensor, x: Tensor) -> Tensor:
    mask[1].copy_(x[0] > 0)
    return mask


def by_base(mask: Tensor, x: Tensor) -> Tensor:
    view = mask.t()
    mask.logical_and_(x > 0)
    return view


def by_chance(mask: Tensor, x: Tensor) -> Tensor:
    return mask.bernoulli_(0.5)


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "written by a value": by_value,
    "written by a view": by_view,
    "read by a view": by_base,
    "random": by_chance,
    "compared": lambda mask, x: mask & (x > 0),
}
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "places": lambda x, mask: x[mask.nonzero()[:, 0]].cumsum(0),
    "number": lambda x, mask: x[: int(mask.sum())].cumsum(0),
    "branch": lambda x, mask: x if mask.any() else -x,
    "one-hot": lambda x, mask: F.one_hot(mask.sum(1)).to(x) * x.sum(),
    "unique": lambda x, mask: mask.sum(1).unique() * x.mean(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", UNKNOWN)
def test_what_a_value_reaches_is_no_constant(change: str, read: str, capfd: pytest.CaptureFixture[str]) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return READS[read](x, UNKNOWN[change](torch.ones(N, N, dtype=torch.bool), x))

    refused = 0
    try:
        model = from_torch(module := Module().eval(), batch_of(N, N).astype(np.float32))
        batches = [] if change == "random" else [batch_of(N, N), -batch_of(N, N), np.ones((N, N)), -np.ones((N, N))]
        for x in batches:
            x = x.astype(np.float32)
            try:
                found = model(model.params, x)[0]
            except UserError as error:
                refused += 1
                assert_by_line(error)
            else:
                np.testing.assert_allclose(found, module(torch.tensor(x)), rtol=1e-5)
        assert refused < 4
    except UserError as error:
        assert_by_line(error)
    assert capfd.readouterr().err == ""


def assert_by_line(error: UserError) -> None:
    assert re.search(r"test_constant_values\.py:\d+", str(error))
    assert "ops=" not in str(error)
    assert "\n" not in str(error)


BELOW: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: torch.bincount(x.argmax(1), minlength=N),
    "topk": lambda x: x.topk(2, dim=-1)[1].flatten().bincount(minlength=N),
    "more bins": lambda x: torch.bincount(x.topk(2)[1][:, 0], minlength=N + 2),
    "weights": lambda x: torch.bincount(x.argmin(0), weights=x[0].detach(), minlength=N),
    "remainder": lambda x: torch.bincount(x[0].mul(9).long() % 4, None, 4),
    "argsort": lambda x: x.argsort(1)[0].bincount(None, N),
    "clamp": lambda x: torch.bincount(x[0].mul(5).long().clamp(0, 2), minlength=3),
    "bool": lambda x: torch.bincount((x[0] > 0).long(), minlength=2),
}


def test_bins_of_values_that_are_below_their_number() -> None:
    def fn(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(count(x * self.w).to(x) * self.w.sum() for count in BELOW.values())

    differences, model = compared(Function(fn), batch_of(N, N), train=False)
    assert max(differences) < 1e-12
    with jax.enable_x64():
        found = model(model.params, -batch_of(N, N))[0]
    expected = fn(Function(fn), torch.tensor(-batch_of(N, N)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs.detach().numpy())


ABOVE: dict[str, Callable[[Tensor], Tensor]] = {
    "inputs": lambda x: torch.bincount(x, minlength=N),
    "few bins": lambda x: torch.bincount(x.float().view(1, -1).repeat(2, 1).argmax(1), minlength=N),
    "written": lambda x: torch.bincount((x % N).index_add(0, torch.tensor([0]), x[:1]), minlength=N),
    "no bins": lambda x: torch.bincount(x % N),
}


@pytest.mark.parametrize("name", ABOVE)
def test_bins_that_may_be_too_few_are_refused(name: str) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ABOVE[name](x) * 1.0

    with pytest.raises(UserError, match=r"value.*test_constant_values\.py:\d+.*one_hot"):
        from_torch(Module().eval(), np.arange(5))


def test_what_pytorch_makes_of_numbers_alone_has_its_values():
    def made(x: Tensor) -> Tensor:
        windows = (torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window)
        float64 = {"dtype": torch.float64}
        vectors = [window(6, periodic=periodic, **float64) for window in windows for periodic in (True, False)]
        vectors += [torch.kaiser_window(6, periodic=True, beta=8.0, **float64), torch.logspace(-1, 1, 6, **float64)]
        vectors += [torch.fft.fftfreq(6, d=0.5, **float64), torch.fft.rfftfreq(10, d=2.0, **float64)]
        return x[:, None] * torch.stack(vectors)

    differences, _ = compared(Function(lambda self, x: made(x) * self.w[0]), batch_of(2, 6), train=False)
    assert max(differences) < 1e-13
