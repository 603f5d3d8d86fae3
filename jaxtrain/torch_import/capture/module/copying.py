"""Copies of modules whose functions refer to the copy as well.

`copy.deepcopy` shares functions and weak references between an object and its copy, so that a lambda over `self` in a
copied module would still read the original's weights. Tensors that share memory with a parameter are copied apart from
it, and tensors that were computed from parameters not at all.
"""

import contextlib
import copy
import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_internals import FakeTensor, is_functorch_wrapped_tensor


class Copy(NamedTuple):
    """A copy of a module.

    Attributes:
      module: The copy.
      held: Its tensors that are no parameters or buffers and depend on them: they share memory with one, or were
        computed from some before.
    """

    module: torch.nn.Module
    held: tuple[torch.Tensor, ...]


def copied(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    computed: Callable[[torch.Tensor], torch.Tensor],
) -> Copy:
    """Return a copy of a module.

    Args:
      module: The module.
      tensors: The copy's parameters and buffers by name, with the strides of the module's.
      computed: From a tensor that was computed from parameters to the one that the copy has in its place.
    """
    copying = _Copying(module, tensors, computed)
    with copying.dispatched(), warnings.catch_warnings():
        # Of copies of iterators, which Python will not have some day.
        warnings.simplefilter("ignore", DeprecationWarning)
        return Copy(copy.deepcopy(module, copying.memo), tuple(copying.held))


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each under its first name."""
    return dict((*module.named_parameters(), *module.named_buffers()))


class Memory:
    """The memory of a module's parameters and buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, x in tensors.items():
            if (storage := _storage(x)) is not None:
                self._owners.setdefault(storage, []).append((name, x))

    def owner(self, x: torch.Tensor) -> str | None:
        """Return the name of the tensor that owns the elements of x; None for elements of their own.

        Raises:
          UserError: x has elements of several tensors, or another dtype than theirs.
        """
        owners = self._owners.get(_storage(x) or 0, [])
        owners = [(name, owner) for name, owner in owners if _overlap(x, owner)]
        if not owners:
            return None
        name, owner = owners[0]
        begin, end = _extent(owner)
        if len(owners) > 1 or owner.dtype != x.dtype or _extent(x)[0] < begin or _extent(x)[1] > end:
            raise refusal(
                f"a tensor shares memory with {name!r} beyond its elements or in another dtype", "compute it in forward"
            )
        return name

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of different tensors with common elements."""
        for owners in self._owners.values():
            for i, (name, x) in enumerate(owners):
                yield from ((name, other) for other, y in owners[i + 1 :] if _overlap(x, y))


def _storage(x: torch.Tensor) -> int | None:
    """Return what identifies the memory of a tensor; None for a tensor without memory of its own."""
    if x.layout != torch.strided or is_functorch_wrapped_tensor(x):
        return None
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # of subclasses that consist of other tensors
        return None


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after the last."""
    last = sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset()) * x.element_size()
    return begin, begin + (last + 1) * x.element_size() if x.numel() else begin


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors in the same memory have common elements."""
    (begin, end), (first, last) = _extent(x), _extent(y)
    if max(begin, first) >= min(end, last):
        return False
    if x.dtype != y.dtype or (x.is_contiguous() and y.is_contiguous()):
        return True
    taken = np.zeros(max(end, last) // x.element_size(), bool)
    _elements(taken, x)[...] = True
    return bool(_elements(taken, y).any())


def _elements(memory: np.ndarray, x: torch.Tensor) -> np.ndarray:
    """Return the bytes that stand for the elements of a tensor, in an array with one for each place in its memory."""
    return np.lib.stride_tricks.as_strided(memory[x.storage_offset() :], x.shape, x.stride())


class _Copying:
    """One call of `copy.deepcopy`."""

    def __init__(
        self,
        module: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        computed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        old = own_tensors(module)
        self._old, self._new, self._computed = old, tensors, computed
        self._memory = Memory(old)
        self._parts = {id(part) for part in module.modules()}
        self.memo: dict[int, Any] = {id(x): tensors[name] for name, x in old.items()}
        self.held: list[torch.Tensor] = []

    @contextlib.contextmanager
    def dispatched(self) -> Iterator[None]:
        """Copy functions, weak references and tensors as this class describes while entered."""
        copiers: dict[type, Callable[[Any, dict[int, Any]], Any]] = {
            types.FunctionType: self._function,
            types.BuiltinFunctionType: self._builtin,
            types.MethodType: self._method,
            weakref.ReferenceType: self._reference,
            weakref.WeakMethod: self._reference,
            weakref.ProxyType: self._proxy,
            weakref.CallableProxyType: self._proxy,
            **dict.fromkeys((torch.Tensor, torch.nn.Parameter, FakeTensor), self._tensor),
        }
        with contextlib.ExitStack() as patches:
            table = {**copy._deepcopy_dispatch, **copiers}  # type: ignore[attr-defined]
            patches.enter_context(replaced(copy, "_deepcopy_dispatch", table))
            if hasattr(copy, "_atomic_types"):  # from Python 3.14 on it comes first
                patches.enter_context(replaced(copy, "_atomic_types", copy._atomic_types - copiers.keys()))
            yield

    def _tensor(self, x: torch.Tensor, memo: dict[int, Any]) -> Any:
        name = self._memory.owner(x)
        if name is not None:
            y = self._view(x, self._old[name], self._new[name])
        elif x.grad_fn is not None:
            y = self._computed(x)
        else:
            return x.__deepcopy__(memo)
        self.held.append(y)
        return y

    def _view(self, x: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the elements of `new` that x has of `old`."""
        has_gradient = x.grad_fn is not None
        place = new.storage_offset() + x.storage_offset() - old.storage_offset()
        with torch.set_grad_enabled(has_gradient):
            y = (new if has_gradient else new.detach()).as_strided(x.shape, x.stride(), place)
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(y, requires_grad=x.requires_grad)
        return y if has_gradient else y.requires_grad_(x.requires_grad)

    def _function(self, fn: types.FunctionType, memo: dict[int, Any]) -> Any:
        if not self._reaches(fn):
            return fn
        fresh = []
        for cell in fn.__closure__ or ():
            if id(cell) not in memo and self._reaches(cell):
                memo[id(cell)] = types.CellType()
                fresh.append(cell)
        closure = tuple(memo.get(id(cell), cell) for cell in fn.__closure__ or ())
        names = self._globals(fn)
        scope = memo.setdefault(id(fn.__globals__), dict(fn.__globals__)) if names else fn.__globals__
        new = types.FunctionType(fn.__code__, scope, fn.__name__, None, closure)
        # What follows may refer to the function.
        memo[id(fn)] = new
        functools.update_wrapper(new, fn, updated=())
        new.__dict__.pop("__wrapped__", None)
        for cell in fresh:
            memo[id(cell)].cell_contents = copy.deepcopy(cell.cell_contents, memo)
        for name in names:
            scope[name] = copy.deepcopy(fn.__globals__[name], memo)
        new.__defaults__ = fn.__defaults__ and tuple(self._item(x, memo) for x in fn.__defaults__)
        new.__kwdefaults__ = fn.__kwdefaults__ and {k: self._item(x, memo) for k, x in fn.__kwdefaults__.items()}
        new.__dict__.update({key: self._item(x, memo) for key, x in vars(fn).items()})
        return new

    def _item(self, x: Any, memo: dict[int, Any]) -> Any:
        """Return the copy of what a function holds; what has nothing of the module is shared."""
        return copy.deepcopy(x, memo) if self._reaches(x) else x

    def _builtin(self, fn: types.BuiltinFunctionType, memo: dict[int, Any]) -> Any:
        """Return a bound method of a tensor, such as `w.mul`."""
        return getattr(copy.deepcopy(fn.__self__, memo), fn.__name__) if self._reaches(fn) else fn

    def _method(self, method: types.MethodType, memo: dict[int, Any]) -> Any:
        return types.MethodType(copy.deepcopy(method.__func__, memo), copy.deepcopy(method.__self__, memo))

    def _reference(self, ref: "weakref.ref[Any]", memo: dict[int, Any]) -> Any:
        return type(ref)(copy.deepcopy(ref(), memo)) if self._reaches(ref) else ref

    def _proxy(self, proxy: Any, memo: dict[int, Any]) -> Any:
        return weakref.proxy(copy.deepcopy(_referent(proxy), memo)) if self._reaches(proxy) else proxy

    def _reaches(self, start: Any) -> bool:
        """Return whether an object leads to a part of the module or to one of its tensors."""
        # The objects themselves: the number of one that is gone may be that of another.
        todo, seen = [start], {id(start): start}
        while todo:
            x = todo.pop()
            if id(x) in self._parts or (isinstance(x, torch.Tensor) and self._is_of_module(x)):
                return True
            for y in self._referents(x):
                if id(y) not in seen:
                    seen[id(y)] = y
                    todo.append(y)
        return False

    def _is_of_module(self, x: torch.Tensor) -> bool:
        return id(x) in self.memo or x.grad_fn is not None or self._memory.owner(x) is not None

    def _referents(self, x: Any) -> Iterable[Any]:
        if isinstance(x, types.FunctionType):
            held = (*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x))
            return (*held, *(x.__globals__[name] for name in _candidates(x)))
        if isinstance(x, weakref.ReferenceType):
            return (x(),)
        if type(x) in (weakref.ProxyType, weakref.CallableProxyType):
            return (_referent(x),)
        if isinstance(x, _CLOSED):
            return ()
        return gc.get_referents(x)

    def _globals(self, fn: types.FunctionType) -> list[str]:
        """Return the names of a function's globals that lead to the module."""
        return [name for name in _candidates(fn) if self._reaches(fn.__globals__[name])]


_CLOSED = (type, types.ModuleType, types.CodeType, types.FrameType, torch.Tensor, str, bytes, int, float, complex)
"""What does not lead on to anything that a copy follows."""
_HOLDERS = (torch.nn.Module, torch.Tensor, functools.partial, types.MethodType, list, tuple, dict)
"""Globals that are followed, besides functions of the same file."""


def _candidates(fn: types.FunctionType) -> list[str]:
    """Return the names of a function's globals that may lead to the module."""
    found = []
    for name in dict.fromkeys(_names(fn.__code__)):
        x = fn.__globals__.get(name)
        if isinstance(x, _HOLDERS) or (isinstance(x, types.FunctionType) and x.__globals__ is fn.__globals__):
            found.append(name)
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and the functions within it read from globals, and those of attributes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _referent(proxy: Any) -> Any:
    """Return the object of a weak proxy, which passes on all attributes but its own class."""
    try:
        return proxy.__str__.__self__
    except ReferenceError:
        return None
