"""Attributes that `forward` assigns besides buffers. A graph has no other state than buffers."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import format_location
from jaxtrain.torch_import.capture.module.carried import Attribute, attribute_of
from jaxtrain.torch_import.capture.values.numbers import Number
from jaxtrain.torch_import.graph import Captured
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_internals import FakeTensor, pytree

_OWN = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""

Attributes = dict[str, list[Any]]


def attributes_of(module: torch.nn.Module) -> Attributes:
    """Return the attributes of all parts of a module by path, each as a flat list."""
    return {name: pytree.tree_leaves(value) for name, value in values_of(module).items()}


def changed(before: Attributes, after: Attributes) -> list[str]:
    """Return the attributes that differ."""
    return [name for name, leaves in after.items() if name not in before or not _equal(leaves, before[name])]


def _equal(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)
        for a, b in zip(new, old, strict=True)
    )


def carried_attributes(
    module: torch.nn.Module,
    run: Callable[[], Any],
    differs: Callable[[Mapping[str, Any]], bool],
    known: Sequence[Attribute],
) -> tuple[list[Attribute], list[str]]:
    """Return the attributes that a module carries from call to call, besides known ones, and those left out.

    An attribute that only the first call changes is a cache. One that each call changes is left out if no call computes
    something else because of it, as one that counts calls.

    Args:
      module: The module before a call.
      run: Calls it.
      differs: Returns whether a call computes something else when attributes have these values, by path.
      known: The attributes that are known to be carried.

    Returns:
      A tuple (attributes that are carried, paths of those that are left out).

    Raises:
      UserError: An attribute is carried that has other values than tensors and numbers.
    """
    given = values_of(module)
    run()
    first, between = attributes_of(module), values_of(module)
    run()
    after, own = values_of(module), {x.path for x in known}
    changing = [name for name in changed(first, attributes_of(module)) if name not in own]
    names = [name for name in changing if _is_read(name, after[name], differs)]
    if not names:
        return [], changing
    found = {name: attribute_of(name, given.get(name), between[name], _assignment(module, name)) for name in names}
    carried = [x for x in found.values() if x is not None]
    if carried:
        return carried, []
    remedy = "register it as a buffer"
    if given.get(names[0]) is None:
        remedy = "call the module once before the import, or register it as a buffer"
    raise refusal(
        f"forward changes the attribute {names[0]!r}, which it depends on", remedy, _assignment(module, names[0])
    )


_OTHERS = (0, 1, 2**30)
"""Numbers of calls with which a module that counts them is traced."""


def _is_read(name: str, value: Any, differs: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return whether a call computes something else because of the value of an attribute, also after many calls."""
    others = [type(value)(other) for other in _OTHERS] if type(value) in (int, float) else []
    return any(differs({name: pytree.tree_map(_with_values, x)}) for x in (value, *others))


def _with_values(x: Any) -> Any:
    """Return a tensor or a number without values as one that has some."""
    if isinstance(x, Number):
        return x.kind(3)
    return torch.full(x.shape, 2.75).to(x.dtype) if isinstance(x, FakeTensor) else x


def values_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of all parts of a module by path, in containers of their own."""
    return {
        f"{path}.{name}".removeprefix("."): pytree.tree_map(lambda x: x, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }


def set_values(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Give the attributes of a module values, by path."""
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        vars(module.get_submodule(owner))[name] = value


def _assignment(module: torch.nn.Module, path: str) -> str:
    """Return the line of a class that assigns an attribute; that of `forward` where none is found."""
    owner, _, name = path.rpartition(".")
    cls = type(module.get_submodule(owner))
    assigns = re.compile(rf"\bself\.{re.escape(name)}\b[^=]*(?<![=!<>])=(?!=)")
    own: list[Any] = [fn for fn in vars(cls).values() if inspect.isfunction(fn) and fn.__name__ != "__init__"]
    for fn in (*own, cls.forward):
        try:
            lines, first = inspect.getsourcelines(inspect.unwrap(fn))
        except (OSError, TypeError):  # no file
            continue
        place = next((i for i, line in enumerate(lines) if assigns.search(line)), 0 if fn is cls.forward else None)
        if place is not None and (place or fn is cls.forward):
            file = inspect.unwrap(fn).__code__.co_filename
            return f"{format_location(file, first + place)}: {lines[place].strip()}"
    return ""


def same(captured: Captured, capture: Callable[[], Captured]) -> bool:
    """Return whether another capture is the same graph with the same constants."""
    try:
        again = capture()
    except Exception:  # PyTorch has no class for a tensor that comes from another trace
        return False
    return again.graph == captured.graph and all(
        np.array_equal(x, captured.constants[name], equal_nan=True) for name, x in again.constants.items()
    )
