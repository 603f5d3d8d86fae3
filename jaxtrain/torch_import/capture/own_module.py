"""A user's own module, used and left as it was."""

import functools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAVES = (type, types.ModuleType, logging.Logger, str, bytes, bool, int, float, complex, torch.dtype, torch.device)
"""Values without a state of the module's."""
_FOREIGN = frozenset({"jax", "jaxlib", "_thread", "threading", "logging"})
"""Packages whose objects have none either."""


@contextmanager
def lent(module: torch.nn.Module) -> Iterator[None]:
    """Set everything back, on exit, that a module reaches: it may be trained, converted and changed while entered.

    Tensors have memory of their own while entered, with the same values, and no gradient. What is reached are
    attributes, containers, closures, hooks, partial functions and generators of random numbers; global variables are
    not. Tensors that share memory share it while entered, too. Uses may be nested.

    Args:
      module: The module.

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
    reached = list(_reached(module))
    tensors = [x for x in reached if isinstance(x, Tensor)]
    with ExitStack() as undo:
        # Containers are set back first, then the tensors that they hold.
        for x in tensors:
            undo.callback(_tensor_as_it_is(x))
        for x in reached:
            if (back := _as_it_is(x)) is not None:
                undo.callback(back)
        _move(tensors, lambda dtype: dtype)
        for x in tensors:
            if x.is_leaf:
                x.grad = None
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
    tensors = [x for x in _reached(module) if isinstance(x, Tensor) and _memory(x) in own]
    _move([x for x in tensors if to(x.dtype) != x.dtype], to)


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


def _move(tensors: Iterable[Tensor], to: Callable[[torch.dtype], torch.dtype]) -> None:
    """Give tensors new memory with the same values on the CPU; those that shared memory share it again."""
    moved: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
    for x in tensors:
        if not _is_plain(x):
            x.data = x.detach().clone() if to(x.dtype) == x.dtype else x.detach().to(to(x.dtype))
            continue
        # Real and complex views of one memory are converted as one.
        real, dtype = _real(x.dtype), _real(to(x.dtype))
        key = _memory(x), real
        if key not in moved:
            whole = torch.empty(0, dtype=real, device=x.device)
            storage = x.untyped_storage()
            whole.set_(storage, 0, (storage.nbytes() // real.itemsize,), (1,))
            moved[key] = torch.empty(whole.shape, dtype=dtype).copy_(whole).untyped_storage()
        x.data = torch.empty(0, dtype=to(x.dtype)).set_(moved[key], x.storage_offset(), x.shape, x.stride())


def _is_plain(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and x.layout == torch.strided
    return plain and not x.is_meta and not x.is_quantized and not x.is_conj() and not x.is_neg()


def _memory(x: Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    if not _is_plain(x) or not x.untyped_storage().nbytes():
        return -id(x)
    return x.untyped_storage().data_ptr()


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _reached(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the objects with a state that a module reaches, each once."""
    seen: set[int] = set()
    waiting: list[Any] = [module]
    while waiting:
        x = waiting.pop()
        if x is None or isinstance(x, _LEAVES) or id(x) in seen or _package(x) in _FOREIGN:
            continue
        seen.add(id(x))
        yield x
        waiting.extend(_inside(x))


def _package(x: Any) -> str:
    return str(getattr(type(x), "__module__", "")).partition(".")[0]


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, Tensor):
        yield from (x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None))
    elif isinstance(x, dict):
        yield from (*x.keys(), *x.values())
    elif isinstance(x, list | tuple | set | frozenset | deque):
        yield from x
    elif isinstance(x, types.FunctionType):
        yield from (x.__defaults__, x.__kwdefaults__, x.__dict__)
        yield from (contents for cell in x.__closure__ or () for contents in _contents(cell))
    elif isinstance(x, types.MethodType):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords, x.__dict__)
    elif isinstance(x, weakref.ref):
        yield x()
    else:
        yield from getattr(x, "__dict__", {}).values()
        yield from (getattr(x, name, None) for name in _slots(x))


def _slots(x: Any) -> Iterator[str]:
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__"))


def _contents(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # an empty cell
        return


def _tensor_as_it_is(x: Tensor) -> Callable[[], None]:
    data, requires_grad, is_leaf = x.data, x.requires_grad, x.is_leaf
    grad = x.grad if is_leaf else None
    hooks = [_hooks_as_they_are(x, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]

    def back() -> None:
        for set_back in hooks:
            set_back()
        if is_leaf:
            x.grad = None
        x.data = data
        if is_leaf:
            x.requires_grad_(requires_grad)
            x.grad = grad

    return back


def _hooks_as_they_are(x: Tensor, name: str) -> Callable[[], None]:
    before = getattr(x, name, None)

    def back() -> None:
        # The dict of hooks that were there is set back as any other.
        if before is None and (added := getattr(x, name, None)):
            added.clear()

    return back


def _as_it_is(x: Any) -> Callable[[], None] | None:
    """Return a function that sets an object back to what it is now; None for one without a state of its own."""
    if isinstance(x, Tensor | tuple | frozenset | types.MethodType | functools.partial | weakref.ref):
        return None
    if isinstance(x, types.FunctionType):
        return _cells_as_they_are(x)
    if isinstance(x, dict):
        return _items_as_they_are(x)
    if isinstance(x, list):
        items = list(x)
        return lambda: None if _same(x, items) else x.__setitem__(slice(None), items)
    if isinstance(x, set | deque):
        members = list(x)
        return lambda: _refill(x, members)
    if isinstance(x, np.ndarray):
        array = x.copy()
        return lambda: np.copyto(x, array) if x.flags.writeable else None
    return _generator_as_it_is(x) or _attributes_as_they_are(x)


def _refill(x: set[Any] | deque[Any], members: list[Any]) -> None:
    if not _same(x, members):
        x.clear()
        x.update(members) if isinstance(x, set) else x.extend(members)


def _generator_as_it_is(x: Any) -> Callable[[], None] | None:
    if isinstance(x, torch.Generator):
        return functools.partial(_set_state, x, x.get_state())
    if isinstance(x, random.Random):
        return functools.partial(x.setstate, x.getstate())
    if isinstance(x, np.random.RandomState):
        return functools.partial(x.set_state, x.get_state())
    if isinstance(x, np.random.Generator):
        return functools.partial(setattr, x.bit_generator, "state", x.bit_generator.state)
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _attributes_as_they_are(x: Any) -> Callable[[], None] | None:
    parts = []
    if isinstance(getattr(x, "__dict__", None), dict):
        parts.append(_items_as_they_are(x.__dict__))
    slots = {name: getattr(x, name) for name in _slots(x) if hasattr(x, name)}
    kind = type(x)

    def back() -> None:
        if type(x) is not kind:  # a parametrization changes the class
            object.__setattr__(x, "__class__", kind)
        for set_back in parts:
            set_back()
        for name, value in slots.items():
            if getattr(x, name, None) is not value:
                object.__setattr__(x, name, value)

    return back if parts or slots else None


def _items_as_they_are(x: dict[Any, Any]) -> Callable[[], None]:
    items = dict(x)

    def back() -> None:
        if not (_same(x.keys(), items.keys()) and _same(x.values(), items.values())):
            x.clear()
            x.update(items)

    return back


def _cells_as_they_are(x: types.FunctionType) -> Callable[[], None]:
    cells = [(cell, list(_contents(cell))) for cell in x.__closure__ or ()]

    def back() -> None:
        for cell, contents in cells:
            if contents and cell.cell_contents is not contents[0]:
                cell.cell_contents = contents[0]

    return back


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether two collections have the same objects in the same order."""
    return [*map(id, now)] == [*map(id, before)]
