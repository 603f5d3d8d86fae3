"""Attributes that `forward` assigns besides buffers. A graph has no other state than buffers."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from jaxtrain.errors import format_location
from jaxtrain.torch_import.graph import Captured
from jaxtrain.torch_import.refusals import refusal

_OWN = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""

Attributes = dict[str, list[Any]]


def attributes_of(module: torch.nn.Module) -> Attributes:
    """Return the attributes of all parts of a module by path, each as a flat list."""
    return {
        f"{path}.{name}".removeprefix("."): _pytree.tree_leaves(value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }


def changed(before: Attributes, after: Attributes) -> list[str]:
    """Return the attributes that differ."""
    return [name for name, leaves in after.items() if name not in before or not _equal(leaves, before[name])]


def _equal(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)
        for a, b in zip(new, old, strict=True)
    )


def refuse_state(
    captured: Captured, module: torch.nn.Module, run: Callable[[], Any], capture: Callable[[], Captured]
) -> None:
    """Refuse a module whose second call computes something else than its first, because of an attribute.

    Args:
      captured: Its first call.
      module: The module before a call.
      run: Calls it.
      capture: Captures its next call.

    Raises:
      UserError: Each call changes an attribute, and the second call is another graph or cannot be captured. An
        attribute that only the first call changes is a cache.
    """
    run()
    first = attributes_of(module)
    run()
    names = changed(first, attributes_of(module))
    if names and not _same(captured, capture):
        raise refusal(
            f"forward changes the attribute {names[0]!r}, which it depends on",
            "register it as a buffer",
            _assignment(module, names[0]),
        )


def _assignment(module: torch.nn.Module, path: str) -> str:
    """Return the line of `forward` that assigns an attribute; that of `forward` itself where none is found."""
    owner, _, name = path.rpartition(".")
    forward = type(module.get_submodule(owner)).forward
    try:
        lines, first = inspect.getsourcelines(forward)
    except (OSError, TypeError):  # no file
        return ""
    assigns = re.compile(rf"\bself\.{re.escape(name)}\b[^=]*(?<![=!<>])=(?!=)")
    place = next((i for i, line in enumerate(lines) if assigns.search(line)), 0)
    return f"{format_location(forward.__code__.co_filename, first + place)}: {lines[place].strip()}"


def _same(captured: Captured, capture: Callable[[], Captured]) -> bool:
    try:
        again = capture()
    except Exception:  # PyTorch has no class for a tensor that comes from another trace
        return False
    return again.graph == captured.graph and all(
        np.array_equal(x, captured.constants[name], equal_nan=True) for name, x in again.constants.items()
    )
