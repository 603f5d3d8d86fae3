"""Each tensor that a module reads, in the place from which it comes.

While a module is traced its parameters and buffers are inputs of the graph. A function that holds a tensor itself, in
its closure, a default, a partial or an alias, holds another object: its value would become a constant of the graph.
"""

import contextlib
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from jaxtrain.torch_import.capture.module.copying import Copy, Memory, own_tensors
from jaxtrain.torch_import.refusals import refusal, source_line
from jaxtrain.torch_internals import FakeTensor, FunctionalTensor, is_functorch_wrapped_tensor

Originals = Mapping[int, "weakref.ref[Any]"]
"""Parts, parameters and buffers of the user's module, by their ids."""


def originals_of(module: torch.nn.Module) -> Originals:
    """Return the parts and tensors of the user's module, which a copy must not read."""
    return {id(x): weakref.ref(x) for x in (*module.modules(), *own_tensors(module).values())}


_ASIDE = "a global or by the closure of a class or of call="
"""Ways to the user's module itself that a copy of it does not follow."""


class Placing(TorchFunctionMode):
    """Puts the graph's inputs in the place of the tensors that functions hold, and refuses those that have none.

    Attributes:
      held: The ids of the inputs that functions hold.
    """

    def __init__(self, copied: Copy, originals: Originals) -> None:
        super().__init__()
        self._tensors = own_tensors(copied.module)
        self._names = {id(x): name for name, x in self._tensors.items()}
        memory = Memory(self._tensors)
        self._dependent = {id(x): x for x in copied.held}
        # Before tracing, which would record what is done with them.
        self._views = {
            key: (name, _view_of(self._tensors[name], x))
            for key, x in self._dependent.items()
            if (name := memory.owner(x)) is not None and not (x.is_leaf and x.requires_grad)
        }
        self._originals = {key: x for key, ref in originals.items() if (x := ref()) is not None}
        self._theirs = Memory({str(key): x for key, x in self._originals.items() if isinstance(x, torch.Tensor)})
        self._inputs: dict[str, torch.Tensor] = {}
        self.held = set[int]()

    @contextlib.contextmanager
    def during(self, module: torch.nn.Module) -> Iterator[None]:
        """Place tensors while entered, with the tensors that a module has now as the inputs."""
        self._inputs = own_tensors(module)
        called = register_module_forward_pre_hook(self._refuse_original)
        try:
            with self, self._unknown_modes():
                yield
        finally:
            called.remove()

    @contextlib.contextmanager
    def _unknown_modes(self) -> Iterator[None]:
        """Refuse to tell the mode of the user's module, which is not that of the copy, while entered."""
        parts = [vars(x) for x in self._originals.values() if isinstance(x, torch.nn.Module) and "training" in vars(x)]
        modes = [part["training"] for part in parts]
        try:
            for part in parts:
                part["training"] = _UnknownMode()
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part["training"] = mode

    def placed(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return tensors, with the graph's in the place of those that functions hold."""
        unplaced: list[torch.Tensor] = []
        result = self._placed(tensors, unplaced)
        if unplaced:
            self._refuse(unplaced[0])
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unplaced: list[torch.Tensor] = []
        args, kwargs = self._placed(args, unplaced), self._placed(kwargs or {}, unplaced)
        # A step has a key of its own.
        kwargs.pop("generator", None)
        result = func(*args, **kwargs)
        # What is known without its values, such as the shape, is known of every tensor.
        if unplaced and _has_tensor(result):
            self._refuse(unplaced[0])
        return result

    def _placed(self, value: Any, unplaced: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, unplaced)
        if type(value) in (list, tuple):
            return type(value)(self._placed(x, unplaced) for x in value)
        if type(value) is dict:
            return {key: self._placed(x, unplaced) for key, x in value.items()}
        return value

    def _tensor(self, x: torch.Tensor, unplaced: list[torch.Tensor]) -> torch.Tensor:
        name = self._names.get(id(x))
        if name is not None:
            # Without export the inputs are the module's own tensors.
            return x if self._inputs.get(name) is x else self._input(name)
        if id(x) in self._views:
            name, view = self._views[id(x)]
            return view(self._input(name) if x.requires_grad else self._input(name).detach())
        if id(x) in self._dependent or self._is_hidden(x):
            unplaced.append(x)
        return x

    def _input(self, name: str) -> torch.Tensor:
        if name not in self._inputs:
            raise refusal(f"an autograd.Function reads {name!r} of the module", "pass it as an argument", _line())
        x = self._inputs[name]
        self.held.add(id(x))
        return x

    def _is_hidden(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is neither one of the graph nor a constant."""
        if isinstance(x, FakeTensor | FunctionalTensor) or is_functorch_wrapped_tensor(x):
            return False
        return (x.requires_grad and torch.is_grad_enabled()) or self._theirs.owner(x) is not None

    def _refuse(self, x: torch.Tensor) -> None:
        if id(x) in self._dependent and x.grad_fn is not None:
            raise refusal("a tensor was computed from parameters before the call", "compute it in forward", _line())
        if self._theirs.owner(x) is not None:
            raise refusal(f"a tensor of the module is read by {_ASIDE}", "read it as an attribute of self", _line())
        raise refusal(
            "a tensor that requires a gradient is no parameter of the module",
            "register it, as by self.name = torch.nn.Parameter(…) or in a ParameterList or ModuleList",
            _line(),
        )

    def _refuse_original(self, part: torch.nn.Module, _: Any) -> None:
        if self._originals.get(id(part)) is part:
            raise refusal(
                f"a part of the module, {type(part).__name__}, is called by {_ASIDE}",
                "call it as an attribute of self, or of the module that call= is given",
                _line(),
            )


class _UnknownMode:
    """The mode of a module that was imported, while its copy is traced."""

    def __bool__(self) -> bool:
        raise refusal(f"the mode of the module is read by {_ASIDE}", "read it as an attribute of self", _line())


def _view_of(base: torch.Tensor, held: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that takes the elements of `held` from a tensor with the strides of `base`, as views do."""
    axes, wanted = _axes(base), _axes(held)
    offset = int(held.storage_offset() - base.storage_offset())
    if wanted == axes:
        return lambda x: x
    if sorted(wanted) == sorted(axes) and len({*axes}) == len(axes):
        order = [axes.index(axis) for axis in wanted]
        return lambda x: x.permute(order)
    index = _index(axes, wanted, offset)
    if index is not None:
        return lambda x: x[index]
    return lambda x: x.as_strided(held.shape, held.stride(), offset)


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    return [*zip(x.shape, x.stride(), strict=True)]


def _index(
    axes: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]], offset: int
) -> tuple[int | slice, ...] | None:
    """Return the numbers and slices by which axes of (length, stride) become others; None for none."""
    starts = dict.fromkeys(range(len(axes)), 0)
    for axis in sorted(starts, key=lambda axis: -axes[axis][1]):
        starts[axis], offset = divmod(offset, max(axes[axis][1], 1))
    for kept in itertools.combinations(starts, len(wanted)):
        index: list[int | slice] = [*starts.values()]
        for axis, (n, stride) in zip(kept, wanted, strict=True):
            step, rest = divmod(stride, max(axes[axis][1], 1)) if n > 1 else (1, 0)
            stop = starts[axis] + (n - 1) * step + 1
            if rest or step < 1 or stop > axes[axis][0]:
                break
            index[axis] = slice(starts[axis], stop, step)
        else:
            return None if offset else tuple(index)
    return None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _line() -> str:
    """Return the user's line that is being executed."""
    return source_line("".join(traceback.format_list(traceback.extract_stack()[:-2])))
