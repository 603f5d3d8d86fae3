"""Python's `max` and `min` of numbers whose values are not known while a module is traced."""

import builtins
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.values.numbers import arithmetic, is_unknown
from jaxtrain.torch_internals import non_strict_utils


def _of_unknown(
    builtin: Callable[..., Any], symbolic: Callable[[Any, Any], Any], exceeds: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Return `max` or `min` that also takes numbers without a value.

    As in Python, an element takes the place of one before it only if it exceeds that: not if it is equal or NaN.
    """
    of_tensors, _ = arithmetic(lambda a, b: torch.where(exceeds(b, a), b, a))

    def of_two(a: Any, b: Any) -> Any:
        if any(isinstance(x, torch.SymInt | torch.SymFloat) for x in (a, b)) and not any(map(is_unknown, (a, b))):
            return symbolic(a, b)
        return of_tensors(*(_tensor(x, (a, b)) for x in (a, b)))

    def extreme(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        is_symbolic = any(is_unknown(x) or isinstance(x, torch.SymInt | torch.SymFloat) for x in values)
        if kwargs or len(values) < 2 or not is_symbolic:
            return builtin(*args, **kwargs)
        return functools.reduce(of_two, values)

    return extreme


def _tensor(x: Any, both: Sequence[Any]) -> Any:
    """Return a Python number beside a tensor as a tensor; others as they are."""
    tensors = [y for y in both if isinstance(y, torch.Tensor)]
    return torch.full((), x, dtype=tensors[0].dtype) if tensors and isinstance(x, int | float) else x


def _as_it_is(*args: Any, real_callable: Callable[..., Any], tensor_callable: object, **kwargs: Any) -> Any:
    """`torch.export`'s own `max` and `min`, which split the gradient of equal elements."""
    return real_callable(*args, **kwargs)


EXTREMES: tuple[tuple[Any, str, Any], ...] = (
    (builtins, "max", _of_unknown(max, torch.sym_max, torch.gt)),
    (builtins, "min", _of_unknown(min, torch.sym_min, torch.lt)),
    (non_strict_utils, "_tensor_min_max", _as_it_is),
)
"""Replacements while a module is traced: owner, name and value."""
