"""Records the calls that a script makes of PyTorch's functions and of modules, while it runs."""

import contextlib
import functools
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.port.calls import Ambient, Call, Interval, Origin, Value, separate, tensors_in, with_values
from jaxtrain.port.refused import Refused, refused_at
from jaxtrain.torch_import import Line, is_internal

READING = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
"""Methods of a tensor by which Python sees its values."""
OF_SHAPE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"})
OF_SHAPE |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
"""Functions that read the shape of a tensor and not its values."""
_OURS = str(Path(__file__).parent)
_DEVICES = ("cpu", "cuda")


class Recorder(TorchFunctionMode):
    """Records calls while entered, those of the script alone: `inside` hides what they call in turn.

    Attributes:
      calls: The calls since `end_interval`.
      reads: Lines of the script that read the values of a tensor.
      on_backward: Called with the loss, and the arguments of `Tensor.backward`, in place of it.
      answer: Called with a module that has tensors and its arguments, in place of the module.
      answer_gradient: Called in place of `torch.autograd.grad` of what depends on the model.
    """

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script
        self.calls: list[Call] = []
        self.reads: dict[Line, None] = {}
        self.on_backward: Callable[..., None] = lambda loss, *args, **kwargs: None
        self.answer: Callable[..., Any] = lambda module, *args, **kwargs: module(*args, **kwargs)
        self.answer_gradient: Callable[..., Any] = torch.autograd.grad
        self._depth = 0
        self._count = 0
        self._made = set[Value]()
        self._called = set[Value]()  # tensors of modules that have been called with gradients
        self._has_batch = False
        self._numbers: dict[int, Value] = {}  # by the identity of a tensor that lives
        self._living: dict[Value, weakref.ref[torch.Tensor]] = {}
        self._held: dict[int, torch.Tensor] = {}  # so that no other tensor has their identity in this interval
        self._origins: dict[Value, Origin] = {}
        self._memory: dict[Value, int] = {}
        self._given: dict[Value, tuple[torch.Tensor, int]] = {}
        self._reads: dict[Value, int] = {}  # versions that calls have read

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the number of a tensor, which lives at least until `end_interval`."""
        if id(tensor) not in self._numbers:
            self._count += 1
            value, key = Value(self._count), id(tensor)
            self._numbers[key] = value
            self._living[value] = weakref.ref(tensor, lambda _: self._forget(key, value))
            self._memory[value] = _memory(tensor)
        self._held[id(tensor)] = tensor
        return self._numbers[id(tensor)]

    def _forget(self, key: int, value: Value) -> None:
        for known in (self._living, self._origins, self._memory, self._given):
            known.pop(value, None)
        if self._numbers.get(key) == value:
            del self._numbers[key]

    def lives(self, value: Value) -> bool:
        """Return whether a tensor still exists."""
        return value in self._living

    def add_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the tensors of a batch."""
        self._has_batch = True
        for x in tensors:
            self._origins[self.value(x)] = Origin.BATCH
            self._given[self.value(x)] = copied(x), _version(x)

    def interval(self, loss: torch.Tensor) -> Interval:
        """Return what was called since `end_interval`, up to a loss."""
        value = self.value(loss)
        read = {value, *(x for call in self.calls for x in (*call.reads(), *call.writes))}
        known = {*read, *self._made, *(x for call in self.calls for x in call.own)}
        before = read - self._made
        identities = {self._numbers[key]: key for key in self._held}
        # What depends on nothing, as a first hidden state, is read where that of another update depends on the model.
        others = {x: self._held[key] for x, key in identities.items() if x in read and not self._origins.get(x)}
        others = {x: tensor for x, tensor in others.items() if self._reads.get(x) == _version(tensor)}
        kept = {x: self._given[x][0] for x in read if x in self._given}
        return Interval(
            calls=tuple(self.calls),
            loss=value,
            memory={x: self._memory.get(x, -x.number) for x in known},
            given={**{x: tensor.detach() for x, tensor in others.items()}, **kept},
            identities={x: identities[x] for x in known if x in identities},
            sizes={
                self._numbers[key]: tuple(x.shape) for key, x in self._held.items() if self._numbers[key] in self._made
            },
            carried=frozenset(x for x in before if self._origins.get(x, Origin.OTHER) & Origin.MODEL),
            leaves=frozenset(x for x, key in identities.items() if _is_leaf(self._held[key])),
        )

    def end_interval(self) -> None:
        """Begin a new list of calls."""
        self.calls, self._made, self._reads, self._has_batch = [], set(), {}, False
        self._held.clear()

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
            module = function if isinstance(function, torch.nn.Module) and has_tensors(function) else None
            own = self._own(module) if module is not None else ()
            origin = self._origin(function, given, is_model=module is not None)
            evaluated = frozenset(id(part) for part in (module.modules() if module else ()) if not part.training)
            self._reads |= {self.value(x): version for x, version in zip(given, versions, strict=True)}
            if origin:
                self._keep(given)
            before, ambient, others = torch.get_rng_state(), _ambient(), _other_numbers() if module else None
            result = self._call(function, origin)(*args, **kwargs)
            if module is not None and ambient.grad and _other_numbers() != others:
                problem = f"{type(module).__name__} draws random numbers of Python or NumPy"
                raise Refused(refused_at(problem, line, "draw them by PyTorch, or outside the module"))
            found = [(path, x) for path, x in tensors_in(result) if id(x) not in self._numbers]
            writes = tuple(self.value(x) for x, version in zip(given, versions, strict=True) if _version(x) != version)
            random = None if torch.equal(before, torch.get_rng_state()) else before
            results = tuple((path, self.value(x)) for path, x in found)
            call = Call(function, positional, named, results, writes, ambient, line, random, origin, own, evaluated)
            if call.sets_data or getattr(function, "__name__", "") == "requires_grad_":
                call = call._replace(writes=(self.value(given[0]),))
                self._memory[call.writes[0]] = _memory(given[0])
            if call.results or call.writes:
                for value in (*(value for _, value in results), *call.writes):
                    self._origins[value] = self._origins.get(value, Origin.OTHER) | origin
                self._made.update(value for _, value in results)
                self.calls += separate(call)
                if origin & Origin.MODEL and not ambient.grad:  # of an evaluation, which may make a lot
                    for _, x in found:
                        del self._held[id(x)]
        return result

    def _call(self, function: Callable[..., Any], origin: Origin) -> Callable[..., Any]:
        """Return what is called in place of a function or a module."""
        if isinstance(function, torch.nn.Module) and has_tensors(function):
            return partial(self.answer, function)
        is_gradient = function is torch.autograd.grad and bool(origin & Origin.MODEL)
        return self.answer_gradient if is_gradient else function

    def _own(self, module: torch.nn.Module) -> tuple[Value, ...]:
        """Return the parameters and buffers of a module; forget what initialized those that have not been called."""
        own = tuple(self.value(x) for x in (*module.parameters(), *module.buffers()))
        for value in own:
            self._origins[value] = self._origins.get(value, Origin.OTHER) | Origin.MODEL
        if torch.is_grad_enabled() and not self._called.issuperset(own):
            new = {self._memory[value] for value in own if value not in self._called}
            self.calls = [call for call in self.calls if not self._initializes(call, new)]
            self._called.update(own)
        return own

    def _initializes(self, call: Call, memory: Collection[int]) -> bool:
        """Return whether a call writes to some memory; before the first call of a module, to that of any parameter."""
        is_first = not self._called and bool(call.origin & Origin.MODEL)
        return any(is_first or self._memory.get(value) in memory for value in call.writes)

    def _origin(self, function: Any, given: Sequence[torch.Tensor], *, is_model: bool) -> Origin:
        """Return what the results of a call depend on."""
        origin = Origin.MODEL if is_model else Origin.OTHER
        for x in given:
            origin |= self._origins.get(self.value(x), Origin.OTHER)
            if x.requires_grad or isinstance(x, torch.nn.Parameter):
                origin |= Origin.MODEL
        if getattr(function, "__name__", "") in OF_SHAPE and origin & Origin.MODEL:
            origin = (origin & ~Origin.MODEL) | Origin.SHAPE
        return origin | Origin.BATCH if self._has_batch else origin

    def _keep(self, given: Sequence[torch.Tensor]) -> None:
        """Keep what the arguments of a call are, of those that are no parameters and not made by the model just now."""
        for x in given:
            value = self.value(x)
            of_model = self._origins.get(value, Origin.OTHER) & Origin.MODEL
            if isinstance(x, torch.nn.Parameter) or (of_model and value in self._made):
                continue
            if value not in self._given or self._given[value][1] != _version(x):
                self._given[value] = copied(x), _version(x)

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


def _is_leaf(x: torch.Tensor) -> bool:
    return x.requires_grad and not x._is_view() and x.is_leaf and not isinstance(x, torch.nn.Parameter)


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides and the alignment of a tensor, on which the order of sums in PyTorch depends."""
    if x.layout != torch.strided or not x.numel() or 0 in x.stride() or x.device.type != "cpu":
        return x.detach().clone()
    before, rest = divmod(x.data_ptr() % _ALIGNMENT, x.element_size())
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = x.detach().new_empty(before + count)
    if rest or memory.data_ptr() % _ALIGNMENT:
        return x.detach().clone()
    return memory.as_strided(x.shape, x.stride(), before).copy_(x.detach())


_ALIGNMENT = 64
"""Bytes at multiples of which PyTorch's memory begins."""


def has_tensors(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters or buffers."""
    return next(itertools.chain(module.parameters(), module.buffers()), None) is not None


def _memory(x: torch.Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse
        return -id(x)


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _other_numbers() -> Any:
    """Return the states of the random numbers of Python and NumPy."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), rest


def _ambient() -> Ambient:
    regions = [(torch.get_autocast_dtype(device), device) for device in _DEVICES if torch.is_autocast_enabled(device)]
    return Ambient(torch.is_grad_enabled(), regions[0] if regions else None)


def recorded_calls(
    recorder: Recorder, around_module: Callable[[torch.nn.Module, Callable[[], Any]], Any]
) -> list[tuple[Any, str, Any]]:
    """Return the replacements, as (owner, name, function), by which calls are recorded that are no functions.

    These are calls of modules and of `torch.autograd.Function`.

    Args:
      recorder: Records them.
      around_module: Makes the call of a module by the script.
    """
    call, apply = torch.nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

    @functools.wraps(call)
    def module_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_inside:
            return call(self, *args, **kwargs)
        return around_module(self, partial(recorder.called, self, args, kwargs))

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = apply.__get__(None, cls)
        return bound(*args, **kwargs) if recorder.is_inside else recorder.called(bound, args, kwargs)

    return [
        (torch.nn.Module, "__call__", module_call),
        (torch.autograd.Function, "apply", classmethod(function_apply)),
    ]
