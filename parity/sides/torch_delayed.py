"""Delayed scaling of fp8 products in PyTorch: the published formulas of TransformerEngine's `DelayedScaling`.

They are those of `_amax_and_scale_update` and `_default_sf_compute` in `transformer_engine/pytorch/quantization.py`,
without TransformerEngine, which needs a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from jaxtrain.passes import Fp8

FORMATS = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
"""Of a layer's input, its weight and the gradient of its output: `Format.HYBRID`."""
_INPUT, _WEIGHT, _GRADIENT = range(3)
_NAME = "delayed_scales"


class Scales:
    """Scales and histories of a layer's input, its weight and the gradient of its output.

    Attributes:
      fp8: The settings.
      scale: [3].
      history: [fp8.history, 3], the largest magnitudes of the last windows; those of the current one come first.
    """

    def __init__(self, fp8: Fp8, dtype: torch.dtype) -> None:
        self.fp8 = fp8
        self.scale = torch.ones(len(FORMATS), dtype=dtype)
        self.history = torch.zeros(fp8.history, len(FORMATS), dtype=dtype)

    def record(self, which: int, x: Tensor) -> None:
        """Record the largest magnitude of an operand, besides those of the window's other micro-batches."""
        self.history[0, which] = torch.maximum(self.history[0, which], x.detach().abs().max().to(self.history.dtype))

    def quantized(self, which: int, x: Tensor) -> Tensor:
        """Return the numbers that an operand is rounded to, multiplied by its scale."""
        largest = torch.finfo(FORMATS[which]).max
        return (x.float() * self.scale[which]).clamp(-largest, largest).to(FORMATS[which]).float()

    def update(self) -> None:
        """Compute the scales of the next window, and begin its entry in the histories."""
        amax = self.history.max(0).values if self.fp8.algorithm == "max" else self.history[0].clone()
        if len(self.history) > 1:
            self.history = torch.roll(self.history, -1, 0)
        self.history[0] = 0
        largest = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS], dtype=amax.dtype)
        scale = torch.where(amax > 0, largest / amax / 2**self.fp8.margin, self.scale)
        scale = torch.where(torch.isfinite(amax), scale, self.scale)
        self.scale = scale.clamp(max=torch.finfo(torch.float32).max)


class Product(torch.autograd.Function):
    """A product whose operands are quantized with scales that are known before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, scales: Scales) -> Tensor:
        """Return x @ weight_t, and record what it multiplies."""
        scales.record(_INPUT, x)
        scales.record(_WEIGHT, weight_t)
        low, low_weight = scales.quantized(_INPUT, x), scales.quantized(_WEIGHT, weight_t)
        ctx.save_for_backward(low, low_weight)
        ctx.scales, ctx.dtype = scales, x.dtype
        return _unscaled(low @ low_weight, scales, _INPUT, _WEIGHT).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of both operands."""
        (x, weight_t), scales = ctx.saved_tensors, ctx.scales
        scales.record(_GRADIENT, gradient)
        low = scales.quantized(_GRADIENT, gradient)
        of_x = _unscaled(low @ weight_t.t(), scales, _GRADIENT, _WEIGHT)
        of_weight = _unscaled(x.flatten(0, -2).t() @ low.flatten(0, -2), scales, _INPUT, _GRADIENT)
        return of_x.to(ctx.dtype), of_weight.to(ctx.dtype), None


def with_scales(fp8: Fp8, layer: Module) -> Scales:
    """Return new scales of a layer, which `update_scales` finds."""
    scales = Scales(fp8, next(layer.parameters()).dtype)
    setattr(layer, _NAME, scales)
    return scales


def update_scales(model: Module) -> None:
    """Update the scales of all layers, once a window."""
    for layer in model.modules():
        if hasattr(layer, _NAME):
            getattr(layer, _NAME).update()


def _unscaled(product: Tensor, scales: Scales, one: int, other: int) -> Tensor:
    return product * (1 / scales.scale[one]) * (1 / scales.scale[other])
