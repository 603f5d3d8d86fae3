"""Calls of PyTorch's functions: their arguments by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Arguments = Mapping[str, Any]
"""The arguments of a call by name, with defaults where PyTorch's signature shows them."""
Call = Callable[..., Tensor]


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
