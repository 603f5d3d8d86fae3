"""Code that needs one number of selected rows, as `x[mask].view(2, -1, 3)`: the example's, checked for every batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.reference import batch_of, weighted
from tests.torch_import.test_selected_rows import Selecting

Tensor = torch.Tensor
ROWS, COUNT, WIDTH = 6, 4, 3


def masks_of(*counts: int) -> list[np.ndarray]:
    """Return masks of rows with some numbers of true elements."""
    rng = np.random.default_rng(0)
    return [rng.permutation(np.arange(ROWS) < count) for count in counts]


def viewed(self: Any, x: Tensor, mask: Tensor) -> Any:
    return self.inner(x[mask].view(2, -1, WIDTH)).cumsum(1)


def kept_and_masked(self: Any, x: Tensor, mask: Tensor) -> Any:
    kept = self.norm(x[mask].reshape(2, -1, WIDTH))
    y = torch.cat([kept, self.w.expand(2, ROWS // 2 - kept.shape[1], -1)], 1)
    return y.cumsum(1) * x[~mask].reshape(2, -1, WIDTH).sum()


def by_nonzero(self: Any, x: Tensor, mask: Tensor) -> Any:
    pairs = torch.nonzero(mask).view(2, 2)
    return x[pairs] * self.w


def by_where(self: Any, x: Tensor, mask: Tensor) -> Any:
    first, second = torch.where(mask)[0].view(2, 2)
    return self.inner(x[first]) - x[second]


def written(self: Any, x: Tensor, mask: Tensor) -> Any:
    y = x.clone()
    y[mask] = self.inner(x[:COUNT].flip(0))
    return y * self.w


def compared(self: Any, x: Tensor, mask: Tensor) -> Any:
    rows = x[mask]
    if len(rows) != COUNT:
        raise ValueError("another number of rows")
    return rows.sort(0).values * self.w


def of_each_value(self: Any, x: Tensor, mask: Tensor) -> Any:
    values, counts = (10 * mask.long() + mask.cumsum(0)).unique(return_counts=True)
    y = x.new_zeros(WIDTH)
    for value, count in zip(values, counts, strict=True):
        y = y * self.w + value / count
    return y


def of_two_masks(self: Any, x: Tensor, mask: Tensor) -> Any:
    y = x.clone()
    y[mask.flip(0)] = self.inner(x[mask])
    return y.index_add(0, torch.where(~mask)[0], x[~mask.flip(0)] * self.w)


CASES = (viewed, kept_and_masked, by_nonzero, by_where, written, compared, of_each_value, of_two_masks)


@pytest.mark.parametrize("fn", CASES)
def test_the_number_of_selected_rows_is_that_of_the_example(fn: Callable[..., Any]) -> None:
    module = Selecting(fn)
    x = batch_of(ROWS, WIDTH)
    same, (other,) = masks_of(COUNT, COUNT, COUNT), masks_of(2)
    with jax.enable_x64():
        model = from_torch(module, (x, same[0]))

        @jax.jit
        @jax.value_and_grad
        def run(params: Any, batch: Any) -> Any:
            return weighted(model(params, batch)[0], jnp)

        for mask in same:
            found, grads = run(model.params, (x, mask))
            module.zero_grad()
            expected = weighted(module(torch.tensor(x), torch.tensor(mask)), torch)
            expected.backward()
            np.testing.assert_allclose(found, expected.item(), rtol=1e-12)
            for name, param in module.named_parameters():
                if param.grad is not None:
                    ours = model.names.to_torch(grads)[name]
                    np.testing.assert_allclose(ours, param.grad, rtol=1e-9, atol=1e-12, err_msg=name)
        assert np.isnan(run(model.params, (x, other))[0])
        with pytest.raises(UserError, match=r"reads \d where it read \d of the example \(test_counted.py:\d+"):
            model(model.params, (x, other))


class Scattered(nn.Module):
    """Features in the places of a mask, of which there may be more than places."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        return x.masked_scatter(mask[:, None], features * self.w)


def test_masked_scatter_has_an_element_for_each_place() -> None:
    module, x, features = Scattered().double(), batch_of(ROWS, WIDTH), batch_of(COUNT, WIDTH) + 1
    few, most, (many,) = masks_of(2), masks_of(COUNT), masks_of(COUNT + 1)
    with jax.enable_x64():
        model = from_torch(module, (x, few[0], features))
        for (mask,) in (few, most):
            batch = x, mask, features
            expected = module(*map(torch.tensor, batch)).detach()
            np.testing.assert_allclose(model(model.params, batch)[0], expected, rtol=1e-12)
        assert np.isnan(jax.jit(model)(model.params, (x, many, features))[0]).all()
        with pytest.raises(UserError, match=r"reads False .* \(test_counted.py:\d+"):
            model(model.params, (x, many, features))


class Positive(nn.Module):
    """Rows above a bound, whose number nothing needs, beside an assertion about the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        assert n.max() < 9
        return self.linear(x[x[:, 0] > 0]).sum(0)


def test_another_number_of_rows_stays_right_beside_an_assertion() -> None:
    module = Positive().double()
    x, n = batch_of(ROWS, WIDTH), np.arange(ROWS)
    with jax.enable_x64():
        model = from_torch(module, (x, n))
        for batch in (x, -x, abs(x), -abs(x)):
            expected = module(torch.tensor(batch), torch.tensor(n)).detach()
            np.testing.assert_allclose(model(model.params, (batch, n))[0], expected, rtol=1e-12, atol=1e-15)
        with pytest.raises(UserError, match=r"test_counted.py:\d+: assert"):
            model(model.params, (x, n + 9))
