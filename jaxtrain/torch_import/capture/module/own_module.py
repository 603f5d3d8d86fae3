"""A user's own module, used and left as it was."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from jaxtrain.torch_import.capture.module.reached import reached_by
from jaxtrain.torch_import.capture.module.restored import has_memory, memory_of, restored


@contextmanager
def lent(*modules: torch.nn.Module) -> Iterator[None]:
    """Set everything back, on exit, that modules reach: they may be trained, converted and changed while entered.

    Tensors are on the CPU while entered, without a gradient. What is reached are attributes, containers, closures,
    hooks, partial functions, global variables that the user's functions name, and generators of random numbers, the
    global ones too. Uses may be nested.

    Args:
      *modules: The modules.

    Example:
      >>> layer = torch.nn.Linear(2, 2)
      >>> before = layer.weight.data_ptr(), layer.weight.tolist()
      >>> with lent(layer):
      ...     layer.weight.data.zero_()
      ...     layer.calls = 1
      tensor([[0., 0.],
              [0., 0.]])
      >>> (layer.weight.data_ptr(), layer.weight.tolist()) == before, hasattr(layer, "calls")
      (True, False)
    """
    reached = reached_by(*modules)
    with restored(reached):
        _convert((x for x in reached if isinstance(x, Tensor)), lambda dtype: dtype)
        yield


def convert_tensors(
    module: torch.nn.Module, to: Callable[[torch.dtype], torch.dtype], state: Iterable[str] = ()
) -> None:
    """Convert a module's parameters and buffers in place, as `module.to`; tensors that share their memory still do.

    Args:
      module: The module.
      to: From the dtype of a tensor to its new one.
      state: Paths of tensors of attributes that are converted as well.

    Example:
      >>> layer = torch.nn.Linear(2, 2)
      >>> layer.same = layer.weight.data
      >>> convert_tensors(layer, lambda dtype: torch.float64)
      >>> layer.same.dtype, layer.same.data_ptr() == layer.weight.data_ptr()
      (torch.float64, True)
    """
    own = {_memory(x) for x in (*module.parameters(), *module.buffers(), *tensors_of(module, state).values())}
    _convert((x for x in reached_by(module) if isinstance(x, Tensor) and _memory(x) in own), to)


def tensors_of(module: torch.nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors of a module by their paths: parameters, buffers, and tensors and numbers of attributes.

    Args:
      module: The module.
      names: The paths, as those of `ImportedModel.state`.

    Example:
      >>> layer = torch.nn.Linear(2, 2)
      >>> layer.hidden, layer.calls = (torch.zeros(3), torch.ones(3)), 5
      >>> {name: x.tolist() for name, x in tensors_of(layer, ["hidden.1", "calls"]).items()}
      {'hidden.1': [1.0, 1.0, 1.0], 'calls': 5}
    """
    return {name: torch.as_tensor(functools.reduce(_item, name.split("."), module)) for name in names}


def set_tensors(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give tensors of a module, by the paths of `tensors_of`, other values."""
    for name, x in tensors.items():
        _with_item(module, name.split("."), x)


def _item(owner: Any, key: str) -> Any:
    if isinstance(owner, dict):
        return next(x for own, x in owner.items() if str(own) == key)
    if isinstance(owner, torch.nn.Module) or not isinstance(owner, list | tuple | deque) or not key.isdigit():
        return getattr(owner, key)
    return owner[int(key)]


def _with_item(owner: Any, keys: list[str], new: Tensor) -> Any:
    """Return an object in which the value at a path has changed: itself, or a new tuple or number."""
    if not keys and isinstance(owner, Tensor):
        with torch.no_grad():
            return owner.copy_(new)
    if not keys:
        return type(owner)(new.item())
    key, *rest = keys
    item = _with_item(_item(owner, key), rest, new)
    if isinstance(owner, tuple):
        if not key.isdigit():
            return owner._replace(**{key: item})  # type: ignore[attr-defined]
        return (*owner[: int(key)], item, *owner[int(key) + 1 :])
    if isinstance(owner, dict):
        owner[next(own for own in owner if str(own) == key)] = item
    elif isinstance(owner, list | deque):
        owner[int(key)] = item
    elif not isinstance(item, Tensor | torch.nn.Module):
        setattr(owner, key, item)
    return owner


def _convert(tensors: Iterable[Tensor], to: Callable[[torch.dtype], torch.dtype]) -> None:
    """Convert tensors to other dtypes, on the CPU; those that shared memory share it again."""
    moved: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
    for x in tensors:
        dtype = to(x.dtype)
        if dtype == x.dtype and (x.is_cpu or x.is_meta):
            continue
        if not _is_plain(x):
            x.data = x.detach().to("cpu", dtype)
            continue
        # Real and complex views of one memory are converted as one.
        key = _memory(x), _real(x.dtype)
        if key not in moved:
            (whole,) = memory_of([x], _real(x.dtype))
            moved[key] = whole.to("cpu", _real(dtype)).untyped_storage()
        x.data = torch.empty(0, dtype=dtype).set_(moved[key], x.storage_offset(), x.shape, x.stride())


def _is_plain(x: Tensor) -> bool:
    return has_memory(x) and not x.is_conj() and not x.is_neg()


def _memory(x: Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    return x.untyped_storage().data_ptr() if _is_plain(x) else -id(x)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
