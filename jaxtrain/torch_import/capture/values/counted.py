"""Rows that a mask selects where `forward` needs one number of them, as `x[mask].view(2, -1, n)` or `x[mask] = rows`.

That number is the one of the example, as an assumption that is checked for every batch. The rows are then those of a
fixed number of places.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from jaxtrain.torch_import.capture.values.known_values import is_mask, is_unknown

_ATEN = torch.ops.aten
PLACES = (_ATEN.nonzero.default, _ATEN.nonzero_numpy.default, _ATEN.where.default)
READING = (_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor)
WRITING = (_ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._unsafe_index_put.default)
_SCATTERING = (_ATEN.masked_scatter.default, _ATEN.masked_scatter_.default)


class Counts:
    """What a module needs to know of the numbers of selected rows.

    Attributes:
      are_needed: Whether a pass compared such a number with another one.
      are_read: Whether they are those of the example.
    """

    def __init__(self) -> None:
        self.are_needed = False
        self.are_read = False

    def note(self, env: ShapeEnv, condition: Any) -> None:
        """Note a condition that `forward` needs to hold."""
        numbers = condition.free_symbols
        self.are_needed |= isinstance(condition, sympy.Eq) and len(numbers) == 1 and numbers <= env.size_like


def is_counted(func: Any, args: Sequence[Any], *, are_read: bool) -> bool:
    """Return whether an operation selects rows by a mask whose value is not known, and their number is needed.

    Args:
      func: The operation.
      args: Its arguments.
      are_read: Whether the numbers of all selected rows are those of the example.
    """
    if func in PLACES:
        return are_read and len(args) == 1 and is_unknown(args[0])
    if func not in (*READING, *WRITING) or not any(is_mask(x) and is_unknown(x) for x in args[1]):
        return False
    return are_read or (func in WRITING and _writes_fixed_rows(*args[:3]))


def _writes_fixed_rows(x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> bool:
    """Return whether values are written that are not one for all rows."""
    given = [axis for axis, index in enumerate(indices) if index is not None]
    axis = given[0] if given[-1] - given[0] < len(given) else 0
    replaced = sum(index.ndim if is_mask(index) else 1 for index in indices if index is not None)
    axis -= x.ndim - replaced + 1 - values.ndim
    return axis >= 0 and type(values.shape[axis]) is int and values.shape[axis] != 1


def selected(func: Any, args: Sequence[Any], kwargs: Any, count: Callable[[torch.Tensor], int | None]) -> Any:
    """Call an operation that selects rows with the places of a mask.

    Args:
      func: The operation.
      args: Its arguments.
      kwargs: Its keyword arguments.
      count: Returns the sum of a mask for the example; None if it is not known.
    """

    def places(mask: torch.Tensor) -> torch.Tensor | None:
        mask = mask if mask.dtype is torch.bool else mask != 0
        size = count(mask.sum())
        return None if size is None else torch.nonzero_static(mask, size=size)

    def columns(index: Any) -> Sequence[Any]:
        found = places(index) if is_mask(index) and is_unknown(index) else None
        return (index,) if found is None else found.unbind(1)

    if func in PLACES:
        found = places(args[0])
        if found is None:
            return func(*args, **kwargs)
        return found if func is _ATEN.nonzero.default else list(found.unbind(1))
    x, indices, *rest = args
    return func(x, [y for index in indices for y in columns(index)], *rest, **kwargs)


def scatters(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation writes a fixed number of elements, one after another, where a mask is true."""
    return func in _SCATTERING and is_unknown(args[1]) and type(args[2].numel()) is int


def has_enough(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return whether there is an element of the source for each place where the mask is true."""
    return mask.expand(x.shape).sum() <= source.numel()
