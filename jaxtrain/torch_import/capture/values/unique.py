"""`torch.unique` and `torch.unique_consecutive` as rows that a mask selects: the first of each run of equal ones."""

from typing import Any

import torch

from jaxtrain.torch_import.capture.values.known_values import is_unknown


def _of_sorted(
    input: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """`torch.unique` of all elements, in their order."""
    if not sorted or dim is not None or not _is_taken(input):
        return _unique(input, sorted, return_inverse, return_counts, dim)
    values, order = input.flatten().sort(stable=True)
    return _runs(values, order, input.shape, return_inverse, return_counts)


def _of_neighbors(
    input: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """`torch.unique_consecutive` of all elements."""
    if dim is not None or not _is_taken(input):
        return _consecutive(input, return_inverse, return_counts, dim)
    values = input.flatten()
    return _runs(values, torch.arange(len(values)), input.shape, return_inverse, return_counts)


_unique, _consecutive = torch.unique, torch.unique_consecutive


def _is_taken(x: torch.Tensor) -> bool:
    """Return whether the elements are not known, and have no gradient, which PyTorch does not define."""
    is_differentiated = x.requires_grad and torch.is_grad_enabled()
    return is_unknown(x) and x.numel() > 0 and not is_differentiated


def _runs(values: torch.Tensor, order: torch.Tensor, shape: torch.Size, inverse: bool, counts: bool) -> Any:
    """Return what is unique among values whose equal ones are next to each other.

    Args:
      values: The values.
      order: The place of each of them in the tensor that is asked.
      shape: Its shape.
      inverse: Whether to return the place of each of its elements among the unique ones as well.
      counts: Whether to return how often each of those occurs as well.
    """
    differs = values[1:] != values[:-1]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), differs])
    runs = torch.cat([torch.zeros(1, dtype=torch.int64), differs.cumsum(0)])
    found = [values[starts]]
    if inverse:
        found.append(torch.zeros_like(runs).scatter(0, order, runs).view(shape))
    if counts:
        lengths = torch.zeros_like(runs).index_add(0, runs, torch.ones_like(runs))
        found.append(lengths[runs][starts])
    return found[0] if len(found) == 1 else tuple(found)


UNIQUE: tuple[tuple[Any, str, Any], ...] = (
    (torch, "unique", _of_sorted),
    (torch, "unique_consecutive", _of_neighbors),
)
"""Replacements while a module is traced: owner, name and value. The methods of a tensor call them."""
