"""Records the calls that a script makes of PyTorch's functions and of modules, while it runs."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.port.calls import Ambient, Call, Program, Value, needed, tensors_in, with_values
from jaxtrain.torch_import import Line, is_internal

READING = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
"""Methods of a tensor by which Python sees its values."""
_OURS = str(Path(__file__).parent)
_DEVICES = ("cpu", "cuda")


class Recorder(TorchFunctionMode):
    """Records calls while entered, those of the script alone: `inside` hides what they call in turn.

    Attributes:
      calls: The calls since `forget`.
      reads: Lines of the script that read the values of a tensor.
      on_backward: Called with the loss, and the arguments of `Tensor.backward`, in place of it.
    """

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script
        self.calls: list[Call] = []
        self.reads: dict[Line, None] = {}
        self.on_backward: Callable[..., None] = lambda loss, *args, **kwargs: None
        self._depth = 0
        self._tensors: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, Value] = {}
        self._count = 0

    def forget(self) -> None:
        """Begin a new list of calls."""
        self.calls = []
        self._tensors, self._numbers = {}, {}

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the number of a tensor, which is kept until `forget`, so that no other one has its identity."""
        if id(tensor) not in self._numbers:
            self._count += 1
            self._numbers[id(tensor)] = Value(self._count)
            self._tensors[self._count] = tensor
        return self._numbers[id(tensor)]

    def tensor(self, value: Value) -> torch.Tensor:
        """Return the tensor of a number."""
        return self._tensors[value.number]

    def program(self, loss: torch.Tensor) -> Program:
        """Return the calls that a loss depends on."""
        return needed(self.calls, self.value(loss), self._memory)

    def _memory(self, value: Value) -> int:
        return self.tensor(value).untyped_storage().data_ptr()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Record nothing while entered."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_inside(self) -> bool:
        """Whether a recorded call is being executed."""
        return self._depth > 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self.on_backward(*args, **kwargs)
        if getattr(func, "__name__", "") in READING:
            self.reads[self.line()] = None
        return self.called(func, args, kwargs)

    def called(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, or a module, and record the call if it makes or changes a tensor."""
        line = self.line()
        with self.inside():
            given = [x for _, x in tensors_in((args, kwargs))]
            versions = [_version(x) for x in given]
            positional, named = with_values((tuple(args), dict(kwargs)), self.value)
            before, ambient = torch.get_rng_state(), _ambient()
            result = function(*args, **kwargs)
            found = [(path, x) for path, x in tensors_in(result) if id(x) not in self._numbers]
            writes = tuple(self.value(x) for x, version in zip(given, versions, strict=True) if _version(x) != version)
            random = None if torch.equal(before, torch.get_rng_state()) else before
            if found or writes:
                results = tuple((path, self.value(x)) for path, x in found)
                self.calls.append(Call(function, positional, named, results, writes, ambient, line, random))
        return result

    def variables(self) -> Iterator[dict[str, Any]]:
        """Yield the variables of the functions of the script that are being executed, innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.script:
                yield {**frame.f_locals}
            frame = frame.f_back

    def line(self) -> Line:
        """Return the innermost line of the script that is being executed; else the innermost one of other code."""
        frame: FrameType | None = sys._getframe(1)
        other: Line | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            if file == self.script:
                return Line(file, frame.f_lineno, frame.f_code.co_name)
            if other is None and not file.startswith(_OURS) and not is_internal(file):
                other = Line(file, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back
        return other or Line(self.script, 1, "<module>")


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _ambient() -> Ambient:
    regions = [(torch.get_autocast_dtype(device), device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    return Ambient(torch.is_grad_enabled(), regions[0] if regions else None)


def recorded_calls(recorder: Recorder, before_module: Callable[[torch.nn.Module], None]) -> list[tuple[Any, str, Any]]:
    """Return the replacements, as (owner, name, function), by which calls are recorded that are no functions.

    These are calls of modules and of `torch.autograd.Function`.

    Args:
      recorder: Records them.
      before_module: Called with each module that the script calls.
    """
    call, apply = torch.nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    @functools.wraps(call)
    def module_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_inside:
            return call(self, *args, **kwargs)
        before_module(self)
        return recorder.called(self, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = apply.__get__(None, cls)
        return bound(*args, **kwargs) if recorder.is_inside else recorder.called(bound, args, kwargs)

    return [
        (torch.nn.Module, "__call__", module_call),
        (torch.autograd.Function, "apply", classmethod(function_apply)),
    ]
