"""Whether the values of a dataclass are of its fields' types: those read from a file may be anything."""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LONGEST = 60  # characters of a value that are shown


def mistyped(values: Any) -> list[str]:
    """Of each field of a dataclass's instance whose value is of another type: its name, its value, what it is to be.

    An int is taken for a float, a bool for neither; numbers are to be finite.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: int
    ...     rate: float | None = None
    >>> mistyped(Sizes(8, 1)), mistyped(Sizes("8", float("nan")))
    ([], ["width '8' is no int", 'rate nan is no float or None'])
    """
    hints = get_type_hints(type(values))
    found = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return [
        f"{name} {shown(value)} is no {_named(hints[name])}"
        for name, value in found.items()
        if not _is(value, hints[name])
    ]


def shown(value: Any) -> str:
    """The value as Python writes it, in one short line."""
    text = str(value) if isinstance(value, int | float | Path) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _is(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or hint is value:
        return True
    if origin in (Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is Literal:
        return any(value is part or (value == part and type(value) is type(part)) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        inner = [parts[0]] * len(value) if parts[1:] == (...,) else parts
        return len(value) == len(inner) and all(map(_is, value, inner))
    if origin in (list, Sequence):
        return isinstance(value, list) and all(_is(entry, parts[0]) for entry in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_is(k, parts[0]) and _is(v, parts[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint if isinstance(hint, type) else object)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def _named(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_named(part) for part in get_args(hint))
    return "None" if hint is types.NoneType else str(getattr(hint, "__name__", hint))
