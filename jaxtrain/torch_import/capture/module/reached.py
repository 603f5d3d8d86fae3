"""What a user's module reaches besides its parts: containers, arrays, and random numbers."""

import functools
import logging
import random
import sysconfig
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jaxtrain.torch_import.refusals import is_internal

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_ATOMS = (
    *weakref.ProxyTypes,  # first: other checks of one look at its object
    *(ModuleType, CodeType, str, bytes, int, float, complex, type(None)),
    *(torch.dtype, torch.device, logging.Logger),
)
"""Classes of what has no state of a module's."""
_FOREIGN = frozenset({"jax", "jaxlib", "_thread", "threading", "logging"})
"""Packages whose objects have none either."""
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of a tensor: None, or in a dict."""


def reached_by(*roots: Any) -> list[Any]:
    """Return what modules and functions reach by their attributes, closures, hooks and the globals that they name.

    Functions and classes of libraries are left out.
    """
    found: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) not in found and not isinstance(value, _ATOMS) and _package(value) not in _FOREIGN:
            found[id(value)] = value
            pending.extend(_parts(value))
    return [*found.values()]


def _package(value: Any) -> str:
    return str(getattr(type(value), "__module__", "")).partition(".")[0]


def _parts(value: Any) -> Iterable[Any]:
    if built_in(value) is not None:
        own = getattr(value, "__dict__", None)
        return [*(members(value)), *([own] if own else [])]
    if isinstance(value, FunctionType):
        return _read_by(value)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords, vars(value))
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, type):
        return () if is_library(_file_of(value)) else (*vars(value).values(), *value.__bases__)
    if isinstance(value, torch.Tensor):
        return (vars(value), *(getattr(value, name, None) for name in HOOKS))
    own = getattr(value, "__dict__", None)
    attributes = (own, type(value)) if isinstance(own, dict) else ()
    return [*attributes, *(x for name in slots_of(value) for x in slot(value, name))]


def built_in(value: Any) -> Any:
    """Return the class of Python's that a container is of; None for what is none.

    Its methods say what the container has; those of a user's class may make an object for each key, or count.
    """
    return next(
        (kind for kind in (OrderedDict, dict, list, tuple, set, frozenset, deque) if isinstance(value, kind)), None
    )


def members(container: Any) -> list[Any]:
    """Return what a container has: of a dict, its keys and their values in turn."""
    kind = built_in(container)
    if isinstance(container, dict):
        return [x for item in kind.items(container) for x in item]
    return [*kind.__iter__(container)]


def slots_of(value: Any) -> Iterator[str]:
    """Yield the names of an object's attributes that are not in its dict."""
    if isinstance(value, CellType):
        yield "cell_contents"
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        yield from (name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__"))


def slot(value: Any, name: str) -> list[Any]:
    """Return what an attribute holds; nothing if it is not set."""
    try:
        return [getattr(value, name)]
    except (AttributeError, ValueError):  # ValueError: a variable without a value
        return []


def _read_by(function: FunctionType) -> list[Any]:
    names = () if is_library(function.__code__.co_filename) else _names(function.__code__)
    read = [x for name, x in function.__globals__.items() if name in names] if names else []
    return [*(function.__closure__ or ()), *read, function.__defaults__, function.__kwdefaults__, vars(function)]


def _names(code: CodeType) -> set[str]:
    """Return the names in a function and in those that are defined in it."""
    return {*code.co_names}.union(*(_names(x) for x in code.co_consts if isinstance(x, CodeType)))


def _file_of(cls: type) -> str:
    return next((x.__code__.co_filename for x in vars(cls).values() if isinstance(x, FunctionType)), "")


def is_library(file: str) -> bool:
    """Return whether a file is not the user's: of an installed package, or of Python."""
    return not file or is_internal(file) or file.startswith(_LIBRARIES)


class Generator:
    """Random numbers of Python, NumPy or PyTorch, by their state."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
        _, self._get, self._set, self._draw = next(x for x in _KINDS if isinstance(numbers, x[0]))

    @property
    def state(self) -> Any:
        """The state, from which the next numbers follow."""
        return self._get(self.numbers)

    @state.setter
    def state(self, value: Any) -> None:
        self._set(self.numbers, value)

    def skip(self) -> None:
        """Draw some numbers."""
        for _ in range(7):
            self._draw(self.numbers)


_KINDS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any], Any]], ...] = (
    (random.Random, lambda x: x.getstate(), lambda x, state: x.setstate(state), lambda x: x.random()),
    (np.random.RandomState, lambda x: x.get_state(), lambda x, state: x.set_state(state), lambda x: x.random()),
    (
        np.random.Generator,
        lambda x: x.bit_generator.state,
        lambda x, state: setattr(x.bit_generator, "state", state),
        lambda x: x.random(),
    ),
    (
        torch.Generator,
        lambda x: x.get_state(),
        lambda x, state: x.set_state(state),
        lambda x: torch.rand((), generator=x),
    ),
)
"""Classes, and the functions that read the state, set it and draw a number."""


GLOBAL = (Generator(random._inst), Generator(np.random.mtrand._rand))
"""The global random numbers of Python and NumPy."""


class GlobalGenerator(TorchFunctionMode):
    """Draws from PyTorch's global random numbers while entered, in the place of a generator that is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: x for name, x in (kwargs or {}).items() if name != "generator"})


def generators_in(values: Sequence[Any]) -> list[Generator]:
    """Return the random numbers among values, without the global ones."""
    kinds = tuple(kind for kind, *_ in _KINDS)
    own = (x for x in values if isinstance(x, kinds) and not isinstance(x, random.SystemRandom))
    return [Generator(x) for x in own if all(x is not known.numbers for known in GLOBAL)]


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of random numbers are equal."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(same_state, a, b))
    return bool(a == b)
