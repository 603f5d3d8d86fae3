"""Branches that are known before any value: on whether numbers are finite, as in `if not torch.isfinite(x).all()`,
which are taken as for finite ones, and on random numbers with a probability of 0 or 1, as in LayerDrop."""

import operator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _methods(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a table of functions with the methods of the same names."""
    return {**{getattr(torch.Tensor, fn.__name__): value for fn, value in table.items()}, **table}


_CHECKS = _methods({torch.isfinite: True, torch.isnan: False, torch.isinf: False})
_REDUCTIONS = _methods({torch.all: bool, torch.any: bool, torch.sum: int})
_OPERATORS: dict[Any, Any] = {
    **{torch.Tensor.__invert__: operator.not_, torch.Tensor.__or__: operator.or_, torch.Tensor.__and__: operator.and_},
    **{torch.Tensor.__eq__: operator.eq, torch.Tensor.__ne__: operator.ne, torch.Tensor.__gt__: operator.gt},
}
_OPERATIONS = _OPERATORS | _methods(
    {
        **{torch.logical_not: operator.not_, torch.logical_or: operator.or_, torch.logical_and: operator.and_},
        **{torch.eq: operator.eq, torch.ne: operator.ne, torch.gt: operator.gt},
    }
)


_LESS = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)


class AssumedFinite(TorchFunctionMode):
    """Answers `bool` and `item` of such checks while entered. All elements of the tensor of a check are alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LESS and getattr(args[0], "_is_drawn", False) and type(args[1]) in (int, float):
            result = func(*args)
            if not 0 < args[1] < 1:
                result._if_finite = args[1] >= 1
            return result
        known = [getattr(x, "_if_finite", x) for x in args]
        is_known = any(hasattr(x, "_if_finite") for x in args)
        is_number = all(isinstance(x, bool | int | float) for x in known)
        if is_known and func in (torch.Tensor.__bool__, torch.Tensor.item):
            return known[0] if func is torch.Tensor.item else bool(known[0])
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and not result.shape:
            result._is_drawn = True
        if func in _CHECKS:
            result._if_finite = _CHECKS[func]
        elif is_known and func in _REDUCTIONS and (known[0] is False or _REDUCTIONS[func] is bool):
            result._if_finite = _REDUCTIONS[func](known[0])
        elif is_known and is_number and func in _OPERATIONS:
            result._if_finite = _OPERATIONS[func](*known)
        return result
