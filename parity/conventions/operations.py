"""Conventions of operations: what JAX's counterpart of a PyTorch function may compute instead."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Arguments = Mapping[str, Any]
"""The arguments of a call by name, with defaults where PyTorch's signature shows them."""
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class OperationConvention:
    """A way in which JAX's counterpart of a PyTorch function may differ.

    Attributes:
      of: Name of PyTorch's function.
      has: What JAX has instead.
      change: The change to make in JAX; "{eps}" stands for PyTorch's argument of that name.
      computes: From PyTorch's function and arguments to the value that JAX computes.
    """

    of: str
    has: str
    change: str
    computes: Callable[[Call, Arguments], Tensor]


def bound(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
    """Return the arguments of a call by name.

    >>> bound(F.gelu, (1.0,), {})
    {'input': 1.0, 'approximate': 'none'}
    """
    name = func.__name__
    if name in BUILTIN:
        defaults = BUILTIN[name]
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    signature = inspect.signature(func).bind(*args, **kwargs)
    signature.apply_defaults()
    return dict(signature.arguments)


def called(name: str) -> Call:
    """Return PyTorch's function of that name, also for a call of the method."""
    found: Call = getattr(F, name, None) or getattr(torch, name)
    return found


_CONV: dict[str, Any] = {
    "input": None,
    "weight": None,
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
_TRANSPOSED: dict[str, Any] = {
    **{"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1},
    "dilation": 1,
}
_POOL: dict[str, Any] = {"input": None, "kernel_size": None, "stride": None, "padding": 0}
_AVERAGE = {**_POOL, "ceil_mode": False, "count_include_pad": True}
_MAXIMUM = {**_POOL, "dilation": 1, "ceil_mode": False}
BUILTIN: dict[str, dict[str, Any]] = {
    "gelu": {"input": None, "approximate": "none"},
    "conv1d": _CONV,
    "conv2d": _CONV,
    "conv3d": _CONV,
    "conv_transpose1d": _TRANSPOSED,
    "conv_transpose2d": _TRANSPOSED,
    "avg_pool1d": _AVERAGE,
    "avg_pool2d": {**_AVERAGE, "divisor_override": None},
    "max_pool1d": _MAXIMUM,
    "max_pool2d": _MAXIMUM,
    "var": {"input": None, "dim": None},
    "std": {"input": None, "dim": None},
    "abs": {"input": None},
    "clamp": {"input": None, "min": None, "max": None},
    "max": {"input": None, "dim": None, "keepdim": False},
    "min": {"input": None, "dim": None, "keepdim": False},
    "scaled_dot_product_attention": {
        **{"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False},
        **{"scale": None, "enable_gqa": False},
    },
}
"""Arguments and defaults of functions without a Python signature."""


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


TINY = 1e-300
"""In place of 0, which PyTorch's batch norm rejects."""
EPSILONS = (1e-5, 1e-6, 1e-3, 1e-8, 1e-12, 0.0, torch.finfo(torch.float32).eps)
NORMS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div")
CROSS = ("cross_entropy", "nll_loss")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
POOLS = ("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d")
ATTENTION = "scaled_dot_product_attention"

OPERATIONS: tuple[OperationConvention, ...] = (
    *(
        OperationConvention(f, f"eps is {e:.3g}", "epsilon={eps}", given(eps=e or TINY))
        for f in NORMS
        for e in EPSILONS
    ),
    OperationConvention("layer_norm", "subtracts no mean (RMSNorm)", "LayerNorm", without_mean),
    OperationConvention("layer_norm", "variance is unbiased", "jnp.var(…, ddof=0)", unbiased_layer_norm),
    OperationConvention("batch_norm", "variance is unbiased", "jnp.var(…, ddof=0)", unbiased_batch_norm),
    OperationConvention(
        "batch_norm", "statistics are the running ones", "use_running_average=False", running_for_batch
    ),
    OperationConvention("batch_norm", "momentum is the old value's weight", "momentum=1 - {momentum}", momentum_of_old),
    OperationConvention(
        "batch_norm", "running variance is biased", "n / (n - 1) times the stored variance", biased_running_var
    ),
    OperationConvention("gelu", "is the tanh approximation", "approximate=False", given(approximate="tanh")),
    OperationConvention("gelu", "is exact", "approximate=True", given(approximate="none")),
    OperationConvention("gelu", "is x·sigmoid(1.702x)", "jax.nn.gelu", quick_gelu),
    *(
        OperationConvention(f, f"runs over axis {axis}", "axis={dim}", over_axis(axis))
        for f in ("softmax", "log_softmax")
        for axis in (-1, 0, 1, 2)
    ),
    *(OperationConvention(f, "padding is SAME", "padding={padding}", same_padding) for f in (*CONVOLUTIONS, *POOLS)),
    *(OperationConvention(f, "padding is 0", "padding={padding}", given(padding=0)) for f in (*CONVOLUTIONS, *POOLS)),
    *(OperationConvention(f, "stride is 1", "strides={stride}, None for the kernel's", given(stride=1)) for f in POOLS),
    *(
        OperationConvention(f, "kernel is mirrored", "kernel[::-1, ::-1], or transpose_kernel=True", flipped)
        for f in (*CONVOLUTIONS, "conv_transpose1d", "conv_transpose2d")
    ),
    *(
        OperationConvention(
            f, f"count_include_pad is {counted}", f"count_include_pad={not counted}", given(count_include_pad=counted)
        )
        for f in ("avg_pool1d", "avg_pool2d")
        for counted in (False, True)
    ),
    *(
        OperationConvention(
            "interpolate", f"antialiasing is {'on' if on else 'off'}", f"antialias={not on}", given(antialias=on)
        )
        for on in (True, False)
    ),
    OperationConvention("interpolate", "cubic has a=-0.5", "a=-0.75, by hand", half_pixel_cubic),
    OperationConvention(
        "interpolate", "nearest is of half pixels", "floor(i · old / new)", given(mode="nearest-exact")
    ),
    *(
        OperationConvention(
            "interpolate", f"align_corners is {on}", f"align_corners={not on}, by hand", given(align_corners=on)
        )
        for on in (False, True)
    ),
    *(
        OperationConvention(f, "divisor is the other: n, or n - 1", "ddof=1 for PyTorch's default", other_correction)
        for f in ("var", "std")
    ),
    *(
        OperationConvention(f, "label_smoothing is 0", "label_smoothing={label_smoothing}", given(label_smoothing=0.0))
        for f in CROSS[:1]
    ),
    *(
        OperationConvention(f, "classes weigh alike", "the weight of each label's class", given(weight=None))
        for f in CROSS
    ),
    *(
        OperationConvention(f, "ignored labels count, as class 0", "where=labels != {ignore_index}", without_ignoring)
        for f in CROSS
    ),
    *(
        OperationConvention(
            f,
            "mean is over ignored labels too",
            "divide by the labels that are not {ignore_index}",
            reduced(lambda x, a: x.mean()),
        )
        for f in CROSS
    ),
    *(
        OperationConvention(f, f"reduction is the {how}", "reduction: {reduction}", given(reduction=how))
        for f in (*CROSS, *LOSSES)
        for how in ("mean", "sum")
    ),
    OperationConvention("kl_div", "divides by rows only", "divide by all elements", given(reduction="batchmean")),
    OperationConvention("mse_loss", "is halved (optax.l2_loss)", "2 * optax.l2_loss", scaled(lambda a: 0.5)),
    OperationConvention(
        "smooth_l1_loss", "is Huber's, not divided by beta", "huber_loss / {beta}", scaled(lambda a: a["beta"])
    ),
    OperationConvention(
        "huber_loss", "is divided by delta (smooth L1)", "{delta} times", scaled(lambda a: 1 / a["delta"])
    ),
    OperationConvention("binary_cross_entropy_with_logits", "has no pos_weight", "pos_weight", given(pos_weight=None)),
    OperationConvention(ATTENTION, "scores are not scaled", "1 / sqrt(head width)", given(scale=1.0)),
    OperationConvention(
        ATTENTION,
        "scores are divided by the width",
        "1 / sqrt(head width)",
        lambda _, a: attended(a, scale=lambda d: 1 / d),
    ),
    OperationConvention(
        ATTENTION, "attends to what is masked", "mask=~mask: True keeps", lambda _, a: attended(a, invert=True)
    ),
    OperationConvention(ATTENTION, "has no mask", "mask, or is_causal=True", unmasked),
    OperationConvention(
        ATTENTION, "mask shows the next position too", "jnp.tril(…, k=0)", lambda _, a: attended(a, diagonal=1)
    ),
    OperationConvention(
        ATTENTION, "softmax runs over the queries", "axis of the keys", lambda _, a: attended(a, axis=-2)
    ),
    OperationConvention(
        ATTENTION, "softmax runs over the heads", "axis of the keys", lambda _, a: attended(a, axis=-3)
    ),
    OperationConvention(
        "embedding", "padding_idx has a gradient", "stop_gradient of row {padding_idx}", given(padding_idx=None)
    ),
    OperationConvention("abs", "slope at 0 is 1", "jaxtrain.losses.subgradients.abs", magnitude),
    OperationConvention("clamp", "slope at its bounds is 1/2", "jaxtrain.losses.subgradients.clamp", halved_clamp),
    *(
        OperationConvention(f, "ties share it", f"jaxtrain.losses.subgradients.{f}", shared_among_ties)
        for f in ("max", "min")
    ),
    OperationConvention("relu", "slope at 0 is 1/2", "jax.nn.relu", halved_relu),
    OperationConvention("leaky_relu", "slope at 0 is 1", "jaxtrain.losses.subgradients.leaky_relu", leaky_at_zero),
    OperationConvention(
        "hardtanh", "slope at its bounds is 1", "jaxtrain.losses.subgradients.hardtanh", hard_at_bounds
    ),
)
"""Tried in this order. In a diagnosis, the text of `has` follows "JAX's"."""
