"""A user's module that is run and left as it was found."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any

import numpy as np
import torch

from jaxtrain.torch_import.capture.reached import GLOBAL, generators_in

Undo = Callable[[], None]


@contextlib.contextmanager
def restored(values: Sequence[Any]) -> Iterator[None]:
    """Restore tensors, containers, arrays and random numbers, those of PyTorch, Python and NumPy too, on exit."""
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    with contextlib.ExitStack() as undo, torch.random.fork_rng():
        for generator in (*GLOBAL, *generators_in(values)):
            undo.callback(setattr, generator, "state", generator.state)
        # In the reverse order: memory first.
        for step in (*map(_contents, values), *map(_gradient, tensors), *map(_bytes, memory_of(tensors, torch.uint8))):
            undo.callback(step)
        yield


def memory_of(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the memory of tensors as vectors, each once, in a dtype, or in that of the first tensor that has it."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if is_plain and tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in found:
                vector = torch.empty(0, dtype=dtype or tensor.dtype, device=tensor.device)
                found[storage.data_ptr()] = vector.set_(storage)
    return [*found.values()]


def _contents(value: Any) -> Undo:
    """Return a function that sets the contents of a container or an array to what they are now."""
    if isinstance(value, dict):
        items = dict(value)
        return lambda: _fill(value, value.update, items, value.items(), items.items())
    if isinstance(value, set | list | deque):
        members = list(value)
        return lambda: _fill(value, value.update if isinstance(value, set) else value.extend, members, value, members)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, CellType):
        return _cell(value)
    return lambda: None


def _fill(
    container: Any, fill: Callable[[Any], None], contents: Any, now: Iterable[Any], before: Iterable[Any]
) -> None:
    """Fill a container with its contents, unless it has the very same ones in their order."""
    if not _same(list(now), list(before)):
        container.clear()
        fill(contents)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(
        x is y or (type(x) is type(y) is tuple and len(x) == len(y) and all(p is q for p, q in zip(x, y, strict=True)))
        for x, y in zip(now, before, strict=True)
    )


def _cell(cell: CellType) -> Undo:
    try:
        before = cell.cell_contents
    except ValueError:  # a variable without a value
        return lambda: None

    def undo() -> None:
        cell.cell_contents = before

    return undo


def _gradient(tensor: torch.Tensor) -> Undo:
    """Return a function that sets whether a tensor has a gradient to what it is now."""
    requires_grad, is_leaf = tensor.requires_grad, tensor.is_leaf

    def undo() -> None:
        if is_leaf and not tensor.is_leaf:
            tensor.detach_()
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return undo


def _bytes(memory: torch.Tensor) -> Undo:
    saved = memory.clone()

    def undo() -> None:
        memory.copy_(saved)

    return undo
