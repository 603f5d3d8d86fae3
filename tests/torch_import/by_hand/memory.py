"""Layers that compute again what a backward pass needs: checkpoints and reversible layers of one's own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch_import.by_hand import Factory, Made, registered

MEMORY: dict[str, Factory] = {}
style = registered(MEMORY)
RNG = np.random.default_rng(10)
ROWS = RNG.standard_normal((4, 6)).astype(np.float32)


class CheckpointFunction(torch.autograd.Function):
    """Of guided-diffusion: inputs and parameters as arguments, the gradient of a second forward pass."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], length: int, *args: Any) -> Any:
        ctx.run_function = run_function
        ctx.input_tensors = list(args[:length])
        ctx.input_params = list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.input_tensors)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
        with torch.enable_grad():
            shallow_copies = [x.view_as(x) for x in ctx.input_tensors]
            output_tensors = ctx.run_function(*shallow_copies)
        input_grads = torch.autograd.grad(
            output_tensors, ctx.input_tensors + ctx.input_params, output_grads, allow_unused=True
        )
        return (None, None, *input_grads)


def checkpoint(func: Callable[..., Any], inputs: Sequence[Tensor], params: Iterable[Tensor], flag: bool) -> Any:
    if flag:
        args = tuple(inputs) + tuple(params)
        return CheckpointFunction.apply(func, len(inputs), *args)
    return func(*inputs)


class ResBlock(nn.Module):
    def __init__(self, use_checkpoint: bool = True) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.norm, self.fc, self.emb = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 12)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._forward, (x, emb), self.parameters(), self.use_checkpoint)
        return out

    def _forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.emb(F.silu(emb)).chunk(2, dim=-1)
        return x + self.fc(F.silu(self.norm(x) * (1 + scale) + shift))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(6, 6), nn.ModuleList([ResBlock(), ResBlock(False), ResBlock()])

    def forward(self, x: Tensor) -> Tensor:
        emb = self.embed(x)
        for block in self.blocks:
            x = block(x, emb)
        return x


@style
def guided_diffusion_checkpoint() -> Made:
    return Diffusion(), ROWS


class ReversibleBlock(nn.Module):
    """Of Reformer: the inputs of a block are computed from its outputs in the backward pass."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = torch.chunk(x, 2, dim=-1)
        with torch.no_grad():
            y1 = x1 + self.f(x2)
            y2 = x2 + self.g(y1)
        return torch.cat([y1, y2], dim=-1)

    def backward_pass(self, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        y1, y2 = torch.chunk(y, 2, dim=-1)
        dy1, dy2 = torch.chunk(dy, 2, dim=-1)
        with torch.enable_grad():
            y1.requires_grad = True
            gy1 = self.g(y1)
            torch.autograd.backward(gy1, dy2)
        with torch.no_grad():
            x2 = y2 - gy1
            dx1 = dy1 + y1.grad
            y1.grad = None
        with torch.enable_grad():
            x2.requires_grad = True
            fx2 = self.f(x2)
            torch.autograd.backward(fx2, dx1, retain_graph=True)
        with torch.no_grad():
            x1 = y1 - fx2
            dx2 = dy2 + x2.grad
            x2.grad = None
            return torch.cat([x1, x2.detach()], dim=-1), torch.cat([dx1, dx2], dim=-1)


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        for block in blocks:
            x = block(x)
        ctx.y = x.detach()
        ctx.blocks = blocks
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y = ctx.y
        for block in reversed(list(ctx.blocks)):
            y, dy = block.backward_pass(y, dy)
        return dy, None


class Reformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(
            [
                ReversibleBlock(
                    nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), nn.GELU())
                )
                for _ in range(2)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = ReversibleFunction.apply(self.inner(x), self.blocks)
        return torch.stack(y.chunk(2, dim=-1)).mean(0)


@style
def reformer_reversible() -> Made:
    return Reformer(), ROWS


class RevNetFunction(torch.autograd.Function):
    """A block of two halves whose inputs are saved, with gradients by `torch.autograd.grad` of the weights as well."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.f, ctx.g, ctx.weights = f, g, weights
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> Any:
        y1, y2 = ctx.saved_tensors
        with torch.no_grad():
            x2 = y2 - ctx.g(y1)
            x1 = y1 - ctx.f(x2)
        with torch.enable_grad():
            x1, x2 = x1.detach().requires_grad_(), x2.detach().requires_grad_()
            z1 = x1 + ctx.f(x2)
            z2 = x2 + ctx.g(z1)
        grads = torch.autograd.grad((z1, z2), (x1, x2, *ctx.weights), (d1, d2))
        return (*grads[:2], None, None, *grads[2:])


class RevNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Softplus())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        weights = (*self.f.parameters(), *self.g.parameters())
        y: Tensor = self.head(torch.cat(RevNetFunction.apply(x1 * 1, x2 * 1, self.f, self.g, *weights), dim=1))
        return y


@style
def revnet() -> Made:
    return RevNet(), ROWS


class MyReLU(torch.autograd.Function):
    """Of PyTorch's tutorial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[x < 0] = 0
        return grad_input * torch.tensor(0.5)


class WithReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(MyReLU.apply(self.a(x)))
        return y


@style
def tutorial_relu() -> Made:
    return WithReLU(), ROWS
