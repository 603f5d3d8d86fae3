"""The well-known examples of automatic differentiation in PyTorch, each trained as a separate case.

Every model is a few numbers, each copied: a single one's rounding is a matter of chance. A batch scales the loss of
each row and copy, so that steps differ and sums round; with all scales 1, the first gradient of every copy is the
well-known number that the case names.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from torch import Tensor

import jaxtrain
from jaxtrain.interop import NameTable, TorchParam
from parity.case import AdamW, Batch, Case

ROWS = 16
COPIES = 32


class Numbers(torch.nn.Module):
    """Create a parameter of shape [COPIES] for each number."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full((COPIES,), value)))


def square() -> Case:
    """(w·x + b)² at w = 2, x = 3, b = 1: gradients 42, 28 and 14."""

    def value(p: Any) -> Any:
        return (p["w"] * p["x"] + p["b"]) ** 2

    return _case("autograd.square", value, value, 200.0, w=2.0, x=3.0, b=1.0)


def cubic() -> Case:
    """x³ + 2x + 1 at 2: gradient 14."""

    def value(p: Any) -> Any:
        return p["x"] ** 3 + 2 * p["x"] + 1

    return _case("autograd.cubic", value, value, 70.0, x=2.0)


def detach() -> Case:
    """w²·w, with its square detached, at 3: gradient 9, not 27."""
    return _case(
        "autograd.detach",
        lambda p: (p["w"] ** 2).detach() * p["w"],
        lambda p: lax.stop_gradient(p["w"] ** 2) * p["w"],
        45.0,
        w=3.0,
    )


def no_grad() -> Case:
    """(v(3) − target)², v(s) = w·s, at w = 2: gradient 24, not 20.

    The target 1 + v(1)/2, of temporal differences, is computed from the same weight without a gradient.
    """

    def torch_value(p: Any) -> Any:
        with torch.no_grad():
            target = 1 + p["w"] / 2
        return (3 * p["w"] - target) ** 2

    def value(p: Any) -> Any:
        target = 1 + lax.stop_gradient(p)["w"] / 2
        return (3 * p["w"] - target) ** 2

    return _case("autograd.no-grad", torch_value, value, 110.0, w=2.0)


def double_backward() -> Case:
    """f''(x)² of f(x) = w·x³ at w = 1, x = 2: gradients 288 of w, 144 of x."""

    def torch_value(p: Any) -> Any:
        f = p["w"] * p["x"] ** 3
        (first,) = torch.autograd.grad(f.sum(), p["x"], create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), p["x"], create_graph=True)
        return second**2

    def value(p: Any) -> Any:
        second = jax.grad(jax.grad(lambda x, w: w * x**3))
        return jax.vmap(second)(p["x"], p["w"]) ** 2

    return _case("autograd.double-backward", torch_value, value, 1200.0, w=1.0, x=2.0)


def reuse() -> Case:
    """w + w² at 3: gradient 1 + 6, the sum over both uses."""

    def value(p: Any) -> Any:
        return p["w"] + p["w"] ** 2

    return _case("autograd.reuse", value, value, 38.0, w=3.0)


def _case(
    name: str, torch_value: Callable[[Any], Any], value: Callable[[Any], Any], clip_norm: float, **start: float
) -> Case:
    def torch_loss(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return (torch_value(dict(model.named_parameters())) * batch["scale"]).sum(), len(batch["scale"])

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        del rng
        return jaxtrain.Loss((value(params)[None] * batch["scale"]).sum(), weight=len(batch["scale"])), {}

    return Case(
        name=name,
        torch_model=lambda: Numbers(**start),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={parameter: jax.ShapeDtypeStruct((COPIES,), np.float32) for parameter in start},
        names=NameTable({parameter: TorchParam(parameter) for parameter in start}),
        batch=_batch,
        rows=ROWS,
        optimizer=AdamW(lr=0.02, weight_decay=0.1),
        clip_norm=clip_norm,
    )


def _batch(seed: int, rows: int) -> Batch:
    return {"scale": np.random.default_rng(seed).uniform(0.0, 2.0, (rows, COPIES)).astype(np.float32)}
