"""What `forward` gets in place of values that a graph cannot contain, while other code than the graph's may take them.

A time or an array of NumPy may be logged, stored or returned. An operation of tensors would have the value of the trace
for ever: it is refused when it happens.
"""

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.errors import UserError
from jaxtrain.torch_import.refusals import is_internal, refusal, source_line

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


class Unread:
    """An array of the values of a tensor, which nothing may read.

    Args:
      error: Raised by what reads it.
    """

    def __init__(self, error: UserError) -> None:
        object.__setattr__(self, "error", error)

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.error


class Seconds(float):
    """A time, which no tensor may depend on.

    Args:
      seconds: The time.
      error: Raised by what depends on it.
    """

    error: UserError

    def __new__(cls, seconds: float, error: UserError) -> "Seconds":
        """Return a time."""
        made = super().__new__(cls, seconds)
        made.error = error
        return made


class WithoutSeconds(TorchFunctionMode):
    """Refuses functions of PyTorch that get a time while entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _flat((args, kwargs)):
            if isinstance(x, Seconds):
                raise x.error
        return func(*args, **(kwargs or {}))


def _flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return _flat([*x.values()])
    return [y for item in x for y in _flat(item)] if isinstance(x, tuple | list) else [x]


def _timed(name: str) -> Callable[[Seconds, Any], Any]:
    operation = getattr(float, name)

    def result(self: Seconds, *others: Any) -> Any:
        found = operation(self, *others)
        return Seconds(found, self.error) if type(found) is float else found

    return result


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BOTH_WAYS = (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "abs", "pos")
for _name in _BOTH_WAYS:
    setattr(Seconds, f"__{_name}__", _timed(f"__{_name}__"))
_OTHERS = ("bool", "int", "float", "index", "eq", "ne", "lt", "le", "gt", "ge", "len", "getitem", "iter", "contains")
for _name in (*_BOTH_WAYS, *_OTHERS, "array", "invert", "matmul", "rmatmul"):
    setattr(Unread, f"__{_name}__", Unread._refused)


def _clock(name: str) -> Callable[[], float]:
    read = getattr(time, name)

    def seconds() -> float:
        if is_internal(sys._getframe(1).f_code.co_filename):
            found: float = read()
            return found
        return Seconds(read(), _error(f"time.{name}() inside forward", "pass the time in the batch"))

    return seconds


def _array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    try:
        return _numpy(self, *args, **kwargs)
    except (RuntimeError, TypeError):
        if is_internal(sys._getframe(1).f_code.co_filename):
            raise
        return Unread(_error("the values of a tensor are read as an array of NumPy", "use functions of PyTorch"))


def _error(problem: str, remedy: str) -> UserError:
    return refusal(problem, remedy, source_line("".join(traceback.format_list(traceback.extract_stack()[:-2]))))


_numpy = torch.Tensor.numpy
OUTSIDE: tuple[tuple[Any, str, Any], ...] = (
    *((time, name, _clock(name)) for name in _CLOCKS),
    (torch.Tensor, "numpy", _array),
)
"""Replacements while a module is traced: owner, name and value."""
