"""A user's module that is run and left as it was found."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.torch_import.capture.module.reached import (
    GLOBAL,
    HOOKS,
    built_in,
    generators_in,
    members,
    slot,
    slots_of,
)

Undo = Callable[[], None]


@contextlib.contextmanager
def restored(values: Sequence[Any]) -> Iterator[None]:
    """Restore objects, and the global random numbers of PyTorch, Python and NumPy, on exit.

    Tensors have no gradient while entered.
    """
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    devices = {x.device for x in tensors if x.is_cuda}
    with contextlib.ExitStack() as undo, torch.random.fork_rng(devices):
        for generator in (*GLOBAL, *generators_in(values)):
            undo.callback(setattr, generator, "state", generator.state)
        # In the reverse order: memory first.
        for step in (*map(_object, values), *map(_tensor, tensors), *map(_bytes, memory_of(tensors, torch.uint8))):
            undo.callback(step)
        yield


def memory_of(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the memory of tensors as vectors, each once, in a dtype, or in that of the first tensor that has it."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if has_memory(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in found:
                vector = torch.empty(0, dtype=dtype or tensor.dtype, device=tensor.device)
                found[storage.data_ptr()] = vector.set_(storage)
    return [*found.values()]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its memory: no sparse one, nor one of a class with operations of its own."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _object(value: Any) -> Undo:
    """Return a function that sets an object, besides its dict, to what it is now."""
    if isinstance(value, dict | set | list | deque):
        return _container(value)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        array = value.copy()
        return lambda: np.copyto(value, array)
    kind, slots = type(value), [(name, x) for name in slots_of(value) for x in slot(value, name)]

    def undo() -> None:
        if type(value) is not kind:  # a parametrization changes the class
            object.__setattr__(value, "__class__", kind)
        for name, x in slots:
            if [*map(id, slot(value, name))] != [id(x)]:
                object.__setattr__(value, name, x)

    return undo


def _container(value: Any) -> Undo:
    """Return a function that gives a container the very same members in the same order."""
    kind, before = built_in(value), members(value)

    def undo() -> None:
        if [*map(id, members(value))] == [*map(id, before)]:
            return
        kind.clear(value)
        if isinstance(value, dict):
            for key, x in zip(before[::2], before[1::2], strict=True):
                kind.__setitem__(value, key, x)
        else:
            (kind.update if isinstance(value, set) else kind.extend)(value, before)

    return undo


def _tensor(x: torch.Tensor) -> Undo:
    """Return a function that sets a tensor, besides its memory, to what it is now."""
    data, requires_grad, is_leaf = x.data, x.requires_grad, x.is_leaf
    grad, without = x.grad if is_leaf else None, [name for name in HOOKS if getattr(x, name, None) is None]
    if is_leaf:
        x.grad = None
    if not has_memory(x):
        x.data = x.detach().clone()

    def undo() -> None:
        for name in without:
            if added := getattr(x, name, None):
                added.clear()
        if is_leaf:
            if not x.is_leaf:
                x.detach_()
            x.grad = None  # may be of another dtype
        x.data = data
        if is_leaf:
            x.requires_grad_(requires_grad)
            x.grad = grad

    return undo


def _bytes(memory: torch.Tensor) -> Undo:
    saved = memory.clone()

    def undo() -> None:
        memory.copy_(saved)

    return undo
