"""`torch.autograd.Function` in the forms in which it is written: PyTorch's own passes, or refused by line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.function import once_differentiable

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.by_hand.tricks import Clamp
from tests.torch_import.reference import Function, batch_of, compared


class Constants(torch.autograd.Function):
    """Tensors of numbers in both passes, beside saved tensors and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.tensor([0.5, -2.0, 3.0], dtype=x.dtype)
        ctx.save_for_backward(x, w)
        return x * w * table, torch.where(x > 0, x, torch.tensor(0.25, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        scale = torch.tensor([1.0, 2.0, 4.0], dtype=x.dtype)
        return g * w * scale + h * torch.tensor(0.1, dtype=x.dtype), (g * x * scale).sum(0)


class Needed(torch.autograd.Function):
    """`needs_input_grad`, a number, a string and None among the arguments, an attribute, once_differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, w: Tensor | None, mode: str = "mean") -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.power, ctx.mode = power, mode
        ctx.save_for_backward(x, w)
        y = x**power if w is None else x**power * w
        return y.mean(0) if mode == "mean" else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        found_x = found_w = None
        if ctx.mode == "mean":
            g = g.expand_as(x) / len(x)
        if ctx.needs_input_grad[0]:
            found_x = 7 * g * ctx.power * x ** (ctx.power - 1) * (1 if w is None else w)
        if w is not None and ctx.needs_input_grad[2]:
            found_w = (g * x**ctx.power).sum(0)
        return found_x, None, found_w, None


class NewStyle(torch.autograd.Function):
    """`setup_context`, an output that is marked as not differentiable."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x) * w
        return y, y.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * g * torch.cos(x) * w + h, (g * torch.sin(x)).sum(0)


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversed(torch.autograd.Function):
    """The identity, forwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.neg()


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "tutorial": lambda m, x: Clamp.apply(x * m.w) * m.w,
    "constants": lambda m, x: Constants.apply(x * m.w, m.w),
    "twice": lambda m, x: Constants.apply(Constants.apply(x, m.w)[1] * m.w, m.w)[0],
    "identity": lambda m, x: (Reversed.apply(x) * m.w, Reversed.apply(y := x * m.w) + 3 * y),
    "needed": lambda m, x: (Needed.apply(x * m.w, 3, m.w), Needed.apply(x * m.w, 2, None, "all")),
    "new_style": lambda m, x: NewStyle.apply(x * m.w, m.w),
    "marked": lambda m, x: NewStyle.apply(x * m.w, m.w)[1] * m.w,
    "first_order": lambda m, x: grad(Saving.apply(h := x * m.w).sum(), h)[0] * m.w,
    "of_a_gradient": lambda m, x: grad(Constants.apply(h := x * m.w, m.w)[0].sum(), h, create_graph=True)[0] ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_their_own_gradient_are_pytorchs(name: str) -> None:
    differences, _ = compared(Function(FUNCTIONS[name]), batch_of(4, 3))
    assert max(differences) <= 1e-14, differences


@pytest.mark.parametrize(
    ("fn", "message", "line"),
    [
        (lambda m, x: Dirty.apply(x * m.w), "changes its input in place", "ctx.mark_dirty(x)"),
        (lambda m, x: Drawing.apply(x * m.w), "draws random numbers", "torch.rand_like(x)"),
        (
            lambda m, x: grad(Saving.apply(h := x * m.w).sum(), h, create_graph=True)[0] ** 2,
            "saves what its forward computes",
            "Saving.apply(h := x * m.w)",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(fn: Any, message: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        from_torch(Function(fn), batch_of(4, 3))
    assert all(text in str(error.value) for text in (message, line, "test_own_gradients.py:"))
