"""Code that asks for float32, of a module in float64."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_FUNCTIONS: dict[Any, Any] = {torch.Tensor.float: torch.Tensor.double}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make the dtypes that code asks for those of float64 while entered, the default one included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wider(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wider = {name: _wider(x) for name, x in (kwargs or {}).items()}
        return _FUNCTIONS.get(func, func)(*map(_wider, args), **wider)


def _wider(x: Any) -> Any:
    return _WIDER.get(x, x) if isinstance(x, torch.dtype) else x
