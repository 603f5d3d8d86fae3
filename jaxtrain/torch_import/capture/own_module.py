"""A user's own module, used and left as it was."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from jaxtrain.torch_import.capture.reached import reached_by
from jaxtrain.torch_import.capture.restored import has_memory, memory_of, restored


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


def convert_tensors(module: torch.nn.Module, to: Callable[[torch.dtype], torch.dtype]) -> None:
    """Convert a module's parameters and buffers in place, as `module.to`; tensors that share their memory still do.

    Args:
      module: The module.
      to: From the dtype of a tensor to its new one.

    Example:
      >>> layer = torch.nn.Linear(2, 2)
      >>> layer.same = layer.weight.data
      >>> convert_tensors(layer, lambda dtype: torch.float64)
      >>> layer.same.dtype, layer.same.data_ptr() == layer.weight.data_ptr()
      (torch.float64, True)
    """
    own = {_memory(x) for x in (*module.parameters(), *module.buffers())}
    _convert((x for x in reached_by(module) if isinstance(x, Tensor) and _memory(x) in own), to)


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
