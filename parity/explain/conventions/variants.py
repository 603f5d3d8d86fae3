"""PyTorch's functions computed as JAX code may compute them instead."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parity.sides.calls import Arguments, Call


def given(**other: Any) -> Callable[[Call, Arguments], Tensor]:
    """Compute PyTorch's function with `other` arguments."""
    return lambda call, a: call(**{**a, **other})


def scaled(factor: Callable[[Arguments], float]) -> Callable[[Call, Arguments], Tensor]:
    """Multiply PyTorch's value by a number."""
    return lambda call, a: call(**a) * factor(a)


def reduced(how: Callable[[Tensor, Arguments], Tensor]) -> Callable[[Call, Arguments], Tensor]:
    """Reduce PyTorch's values of the elements in another way."""
    return lambda call, a: how(call(**{**a, "reduction": "none"}), a)


def without_mean(call: Call, a: Arguments) -> Tensor:
    """A layer norm that divides by the root of the mean square."""
    return affine(F.rms_norm(a["input"], a["normalized_shape"], None, a["eps"]), a, a["normalized_shape"])


def unbiased_layer_norm(call: Call, a: Arguments) -> Tensor:
    """A layer norm with the unbiased variance."""
    shape = a["normalized_shape"]
    times = math.prod(shape) / (math.prod(shape) - 1)
    return affine(call(a["input"], shape, eps=a["eps"] / times) / math.sqrt(times), a, shape)


def unbiased_batch_norm(call: Call, a: Arguments) -> Tensor:
    """A batch norm with the unbiased variance."""
    x, n = a["input"], a["input"].numel() // a["input"].shape[1]
    times = n / (n - 1)
    call(**a)  # updates the buffers as PyTorch does
    normed = call(x, None, None, training=True, eps=a["eps"] / times) / math.sqrt(times)
    return affine(normed, a, (-1, *[1] * (x.dim() - 2)))


def affine(x: Tensor, a: Arguments, shape: Sequence[int]) -> Tensor:
    """Multiply by the weight and add the bias, both reshaped to `shape`."""
    x = x if a["weight"] is None else x * a["weight"].reshape(shape)
    return x if a["bias"] is None else x + a["bias"].reshape(shape)


def running_for_batch(call: Call, a: Arguments) -> Tensor:
    """A batch norm that uses its running statistics in training."""
    if a["running_var"] is None:
        return call(**a)
    before = a["running_mean"].clone(), a["running_var"].clone()
    call(**a)
    return call(**{**a, "running_mean": before[0], "running_var": before[1], "training": False})


def momentum_of_old(call: Call, a: Arguments) -> Tensor:
    """A batch norm whose momentum is the weight of the old statistics."""
    return call(**{**a, "momentum": 1 - a["momentum"]})


def biased_running_var(call: Call, a: Arguments) -> Tensor:
    """A batch norm that stores the biased variance."""
    if a["running_var"] is None:
        return call(**a)
    n, new = a["input"].numel() // a["input"].shape[1], a["running_var"].clone()
    out = call(**{**a, "running_var": new})
    old = (1 - a["momentum"]) * a["running_var"]
    a["running_var"].copy_(old + (new - old) * (n - 1) / n)
    return out


def same_padding(call: Call, a: Arguments) -> Tensor:
    """A convolution or pooling padded to SAME, with the odd element at the end."""
    spatial = a["input"].dim() - 2
    kernel = a["weight"].shape[2:] if "weight" in a else _each(a["kernel_size"], spatial)
    strides = _each(a["kernel_size"] if a["stride"] is None else a["stride"], spatial)
    pads: list[int] = []
    for size, k, s, d in zip(a["input"].shape[2:], kernel, strides, _each(a.get("dilation", 1), spatial), strict=True):
        total = max((math.ceil(size / s) - 1) * s + d * (k - 1) + 1 - size, 0)
        pads = [total // 2, total - total // 2, *pads]
    outside = 0.0 if "weight" in a or "count_include_pad" in a else -math.inf
    return call(**{**a, "input": F.pad(a["input"], pads, value=outside), "padding": 0})


def flipped(call: Call, a: Arguments) -> Tensor:
    """A convolution with a mirrored kernel."""
    return call(**{**a, "weight": a["weight"].flip(tuple(range(2, a["weight"].dim())))})


def quick_gelu(call: Call, a: Arguments) -> Tensor:
    """The sigmoid approximation of GELU."""
    return a["input"] * torch.sigmoid(1.702 * a["input"])


def half_pixel_cubic(call: Call, a: Arguments) -> Tensor:
    """Keys' cubic with a = −1/2 without antialiasing, one axis after the other."""
    x = a["input"]
    if a["mode"] != "bicubic" or a["align_corners"] or a["antialias"]:
        return call(**a)
    for axis, size in enumerate(call(**a).shape[2:], start=2):
        x = torch.tensordot(x, _cubic(x.shape[axis], size).to(x), dims=([axis], [0])).movedim(-1, axis)
    return x


def other_correction(call: Call, a: Arguments) -> Tensor:
    """A variance or a deviation with the other divisor."""
    a = dict(a)
    biased = a.pop("unbiased", True) is False or a.pop("correction", 1) == 0
    if isinstance(a["dim"], bool):  # var(x, unbiased)
        biased, a["dim"] = not a["dim"], None
    return call(**a, correction=1 if biased else 0)


def without_ignoring(call: Call, a: Arguments) -> Tensor:
    """A cross-entropy that counts an ignored label as class 0."""
    ignored = a["target"] == a["ignore_index"]
    return call(**{**a, "target": a["target"].masked_fill(ignored, 0)})


def attended(
    a: Arguments,
    *,
    scale: Callable[[int], float] | None = None,
    axis: int = -1,
    diagonal: int = 0,
    invert: bool = False,
) -> Tensor:
    """Attention in elementary operations, with another `scale`, softmax `axis`, causal `diagonal` or mask."""
    q, k, v = a["query"], a["key"], a["value"]
    if a["enable_gqa"]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    right = 1 / math.sqrt(q.shape[-1]) if a["scale"] is None else a["scale"]
    scores = q @ k.mT * (right if scale is None else scale(q.shape[-1]))
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if a["is_causal"] else a["attn_mask"]
    if mask is not None and mask.dtype != torch.bool and not (diagonal or invert):
        scores, mask = scores + mask, None
    if mask is not None:
        shown = mask if mask.dtype == torch.bool else mask == 0
        shown = ~shown if invert else shown | shown.roll(diagonal, -1)
        scores = scores.masked_fill(~shown, -math.inf)
    return F.dropout(torch.softmax(scores, axis), a["dropout_p"]) @ v


def unmasked(call: Call, a: Arguments) -> Tensor:
    """Attention to everything."""
    return call(**{**a, "attn_mask": None, "is_causal": False})


def over_axis(axis: int) -> Callable[[Call, Arguments], Tensor]:
    """A softmax over another axis."""
    return lambda call, a: call(a["input"], dim=axis)


def magnitude(call: Call, a: Arguments) -> Tensor:
    """|x| with the slope 1 at 0."""
    return torch.where(a["input"] >= 0, a["input"], -a["input"])


def halved_clamp(call: Call, a: Arguments) -> Tensor:
    """A clamp that passes half of the gradient at its bounds."""
    x = a["input"]
    for bound, hold in ((a["min"], torch.maximum), (a["max"], torch.minimum)):
        x = x if bound is None else hold(x, torch.as_tensor(bound).to(x))
    return x


def leaky_at_zero(call: Call, a: Arguments) -> Tensor:
    """A leaky ReLU with the slope 1 at 0."""
    return torch.where(a["input"] >= 0, a["input"], a["negative_slope"] * a["input"])


def hard_at_bounds(call: Call, a: Arguments) -> Tensor:
    """A hardtanh that passes the gradient at its bounds."""
    x = a["input"]
    return torch.where((x >= a["min_val"]) & (x <= a["max_val"]), x, call(**a))


def halved_relu(call: Call, a: Arguments) -> Tensor:
    """A ReLU with the slope 1/2 at 0."""
    return torch.maximum(a["input"], torch.zeros_like(a["input"]))


def shared_among_ties(call: Call, a: Arguments) -> Any:
    """A maximum or minimum over an axis whose gradient equal elements share."""
    if not isinstance(a["dim"], int):  # over everything, where PyTorch shares it too, or of two tensors
        return call(*(x for x in (a["input"], a["dim"]) if x is not None))
    taken = call(**a)
    shared = torch.amax if call is torch.max else torch.amin
    return type(taken)((shared(a["input"], a["dim"], a["keepdim"]), taken.indices))


def _each(value: Any, n: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and len(tuple(value)) == n else (value,) * n


def _cubic(size: int, new: int) -> Tensor:
    """float64[size, new]: weight of each old sample in each new one; samples beyond the edge are dropped."""
    at = (torch.arange(new, dtype=torch.float64) + 0.5) * size / new - 0.5
    x = (at[None] - torch.arange(size, dtype=torch.float64)[:, None]).abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
    return weights / weights.sum(0)
