"""Equal operands of `clamp`, `fmax` and `fmin` share the gradient as in the PyTorch that captured them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxtrain.torch_import import from_torch
from jaxtrain.torch_import.capture import convert
from jaxtrain.torch_import.ops import ties

INF, NAN = float("inf"), float("nan")
SINCE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)

# (x, low, high): gradients of PyTorch 2.14.1 by x, low and high.
BETWEEN = {
    (-1, 0, 1): (0, 1, 0),
    (0, 0, 1): (0.5, 0.5, 0),
    (0, -1, 1): (1, 0, 0),
    (1, 0, 1): (0.5, 0, 0.5),
    (2, 0, 1): (0, 0, 1),
    (-1, 0, 0): (0, 1, 0),
    (0, 0, 0): (1, 0, 0),
    (1, 0, 0): (0, 0, 1),
    (0, 1, 0): (0, 0, 1),
    (-1, 1, 0): (0, 0, 1),
    (2, 1, 0): (0, 0, 1),
    (NAN, 0, 1): (1, 0, 0),
    (0, NAN, 1): (1, 0, 0),
    (0, 0, NAN): (1, 0, 0),
}
OF_TWO = {"min": lambda x, y: ties.clamp(x, min=y), "max": lambda x, y: ties.clamp(x, max=y), "fmax": ties.fmax}
OF_TWO["fmin"] = ties.fmin
IN_PYTORCH = {"min": lambda x, y: torch.clamp(x, min=y), "max": lambda x, y: torch.clamp(x, max=y)}
IN_PYTORCH |= {"fmax": torch.fmax, "fmin": torch.fmin}


def gradients(fn, values):
    numbers = [jnp.float32(x) for x in values]
    return tuple(float(x) for x in jax.grad(fn, argnums=tuple(range(len(numbers))))(*numbers))


def gradients_in_pytorch(fn, values):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]
    return tuple(x.item() for x in torch.autograd.grad(fn(*tensors), tensors))


def test_arrays_as_bounds_share_the_gradient():
    for values, expected in BETWEEN.items():
        assert gradients(ties.clamp, values) == expected, values
        if SINCE_2_14:
            assert gradients_in_pytorch(torch.clamp, values) == expected, values
    for name, fn in OF_TWO.items():
        for x, y in itertools.product((-1, 0, INF), repeat=2):
            takes_x = float(x > y) if name in ("min", "fmax") else float(x < y)
            expected = (0.5, 0.5) if x == y else (takes_x, 1 - takes_x)
            assert gradients(fn, (x, y)) == expected, (name, x, y)
            if SINCE_2_14:
                assert gradients_in_pytorch(IN_PYTORCH[name], (x, y)) == expected, (name, x, y)
        assert gradients(fn, (NAN, 0)) == gradients(fn, (0, NAN)) == (1, 1)


def test_numbers_as_bounds_take_the_gradient():
    x = [-INF, -2, -1, 0, 1, 2, INF, NAN]
    expected = {
        (-1, 1): (0, 0, 0, 1, 0, 0, 0, 0),
        (-1, None): (0, 0, 0, 1, 1, 1, 1, 0),
        (None, 1): (1, 1, 1, 1, 0, 0, 0, 0),
    }
    for (low, high), slopes in expected.items():
        found = jax.vmap(jax.grad(lambda x, low=low, high=high: ties.clamp(x, low, high)))(jnp.array(x))
        np.testing.assert_array_equal(found, slopes)
        tensor = torch.tensor(x, requires_grad=True)
        clamped = torch.clamp(tensor, low, high)
        np.testing.assert_array_equal(ties.clamp(jnp.array(x), low, high), clamped.detach().numpy())
        if SINCE_2_14:
            np.testing.assert_array_equal(torch.autograd.grad(clamped.sum(), tensor)[0], slopes)
    assert ties.clamp(jnp.arange(3), 1, None).tolist() == [1, 1, 2]


class Choices(torch.nn.Module):
    """Choices of which one operand is often equal to another."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))

    def forward(self, x):
        w = self.w
        return (
            w.clamp(-1, 1)
            + 2 * w.clamp(min=x)
            + 3 * torch.clamp_max(w, 0)
            + 5 * torch.fmax(w, x)
            + 7 * torch.fmin(x, w)
        )


def test_the_convention_is_found_whatever_mode_the_capture_is_imported_in():
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with mode:
            assert convert._has_shared_ties() == SINCE_2_14


@pytest.mark.parametrize("shares", [False, True])
def test_a_capture_keeps_the_gradients_of_its_pytorch(shares, monkeypatch):
    module, x = Choices(), torch.tensor([-1.0, 0.0, 2.0])
    expected = [10, 8, 7] if shares else [11, 11, 8]
    if shares == SINCE_2_14:
        assert torch.autograd.grad(module(x).sum(), module.w)[0].tolist() == expected
    else:
        monkeypatch.setattr("jaxtrain.torch_import.capture.convert._shares_ties", shares)
    model = from_torch(module, x)
    found = jax.grad(lambda params: model(params, jnp.asarray(x.numpy()))[0].sum())(model.params)
    assert found["w"].tolist() == expected
