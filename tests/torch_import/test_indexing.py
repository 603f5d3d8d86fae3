"""Writes and reads by index, and places computed from sizes, are PyTorch's; what a capture cannot tell is refused."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from jaxtrain.torch_import.ops.network.resample import nearest_places
from tests.torch_import.reference import Function, compared

Tensor = torch.Tensor


def written(x: Tensor, index: Any, value: Any, accumulate: bool = False) -> Tensor:
    x = x.clone()
    if accumulate:
        return x.index_put_(index if isinstance(index, tuple) else (index,), value, accumulate=True)
    x[index] = value
    return x


ROWS = torch.tensor([[True, False, True, False, True]] * 3 + [[False] * 5])
"""A mask with nine places."""
COLUMN = torch.tensor([True, False, True, True, False])
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row for each place": lambda x, v: written(x, ROWS, v[:9]),
    "one row": lambda x, v: written(x, ROWS, v[0]),
    "one row of two axes": lambda x, v: written(x, ROWS, v[:1]),
    "a number": lambda x, v: written(x, ROWS, 2.0),
    "a number for each place": lambda x, v: written(x, ROWS, v[:9, :1]),
    "added rows": lambda x, v: written(x, ROWS, v[:9], accumulate=True),
    "an added row": lambda x, v: written(x, ROWS, v[0], accumulate=True),
    "a mask of the second axis": lambda x, v: written(x, (slice(None), COLUMN), v[:3]),
    "a mask of the second axis, by examples": lambda x, v: written(x, (slice(None), COLUMN), v.reshape(4, 3, 3)[:, :3]),
    "a mask of the last axis": lambda x, v: written(x, (..., torch.tensor([True, False, True])), v[:5, :2]),
    "a mask of everything": lambda x, v: written(x, torch.ones(4, 5, 3, dtype=torch.bool), v.repeat(5, 1).ravel()[:60]),
    "negative indices": lambda x, v: written(x, torch.tensor([-1, 0]), v[:5]),
    "two index tensors": lambda x, v: written(x, (torch.tensor([0, -2]), torch.tensor([1, 3])), v[:2]),
    "separated index tensors": lambda x, v: written(
        x, (torch.tensor([0, 2]), slice(None), torch.tensor([1, 2])), v[0, 0]
    ),
    "broadcast index tensors": lambda x, v: written(x, (torch.tensor([[0], [2]]), torch.tensor([1, 3, 4])), v[:3]),
    "repeated indices, added": lambda x, v: written(x, torch.tensor([1, 1, 3]), v[:5], accumulate=True),
    "slices": lambda x, v: written(x, (slice(1, None, 2), slice(-2, None)), v[:2]),
    "read by indices": lambda x, v: x[torch.tensor([-1, 2, 2]), torch.tensor([0, -5, 4])],
    "masked_scatter": lambda x, v: x.masked_scatter(ROWS[..., None], v.repeat(2, 1)),
    "masked_fill": lambda x, v: x.masked_fill(ROWS[..., None], 3.0),
}


def test_writes_and_reads_by_index() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(4, 5, 3, dtype=torch.float64))
            self.v = nn.Parameter(torch.randn(12, 3, dtype=torch.float64))

        def forward(self, scale: Tensor) -> tuple[Tensor, ...]:
            return tuple(case(self.x * scale, self.v * scale) for case in CASES.values())

    differences, _ = compared(Module(), np.ones(()))
    assert max(differences) < 1e-12


def test_a_mask_with_another_number_of_places_is_not_silent() -> None:
    module = Function(lambda self, x: written(x, x > 0, self.w.to(x.dtype)))
    x = np.array([1.0, 2.0, 3.0, -1.0])
    with jax.enable_x64():
        model = from_torch(module, x)
        np.testing.assert_array_equal(model(model.params, x)[0], module(torch.tensor(x)).detach().numpy())
        assert np.isnan(jax.jit(model)(model.params, -x)[0]).all()
        with pytest.raises(UserError, match=r"reads 1 where it read 3 .*test_indexing\.py"):
            model(model.params, -x)


def test_masks_beside_indices_are_refused() -> None:
    module = Function(lambda self, x: written(x, (x[:, 0] > 0, torch.tensor([0])), 1.0)).float()
    model = from_torch(module, np.ones((4, 5), np.float32))
    with pytest.raises(UserError, match=r"a mask beside other indices.*test_indexing\.py"):
        model(model.params, np.ones((4, 5), np.float32))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_nearest_pixels_of_all_sizes(mode: str, dtype: torch.dtype) -> None:
    wrong = []
    for size in range(1, 65):
        x = torch.arange(size, dtype=dtype)[None, None]
        given = [(out, {"size": out}) for out in range(1, 129)]
        given += [(s, {"scale_factor": s}) for s in (0.3, 1 / 3, 0.5, 0.7, 1.3, 1.5, 2.0, 2.3, 3.7) if int(size * s)]
        for asked, options in given:
            theirs = F.interpolate(x, mode=mode, **options)[0, 0].numpy()
            real = np.dtype(str(dtype).removeprefix("torch."))
            ours = nearest_places(size, len(theirs), options.get("scale_factor"), real, mode == "nearest-exact")
            wrong += [(size, asked)] * (not np.array_equal(ours, theirs))
    assert not wrong


def resizings() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of axes and arguments of `interpolate`."""
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}
    for rank, mode, size in product((1, 2, 3), ("nearest", "nearest-exact", "area"), (7, 25)):
        yield rank, {"size": size, "mode": mode}
    for mode, scale, recompute in product(("nearest", "bilinear", "bicubic"), (0.7, 2.3), (None, True)):
        yield 2, {"scale_factor": scale, "mode": mode, "recompute_scale_factor": recompute}
    for (rank, mode), corners in product((*linear.items(), (2, "bicubic")), (False, True)):
        yield rank, {"size": 9, "mode": mode, "align_corners": corners}
    for mode, size in product(("bilinear", "bicubic"), (5, 23)):
        yield 2, {"size": size, "mode": mode, "antialias": True}


def test_images_of_other_sizes() -> None:
    def resized(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        images = {1: x[:, :, 0, 0], 2: x[:, :, 0], 3: x}
        return tuple(F.interpolate(images[rank] * self.w[0], **options) for rank, options in resizings())

    differences, _ = compared(Function(resized), np.random.default_rng(0).standard_normal((1, 1, 14, 14, 14)))
    assert max(differences) < 1e-12


def test_numbers_at_equal_distances() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            steps = [torch.linspace(0, size - 1, count) for size in range(2, 40, 5) for count in (2, 7, 8, 30)]
            ranges = [torch.arange(0, 3, 0.1), torch.arange(1.0, 2.0, 0.05), torch.arange(5, -5, -2), torch.arange(7)]
            return (x, *steps, *ranges)

    module, x = Module(), np.ones(1, np.float32)
    ours, _ = from_torch(module, x)({}, x)
    for a, b in zip(ours, module(torch.tensor(x)), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(a), b.numpy().astype(np.asarray(a).dtype), 1)
