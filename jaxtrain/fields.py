"""Validate the values of a dataclass against its field types: values read from a file may be anything.

`beartype.door.is_bearable` (0.23.1) accepts NaN, and a bool as an int, and checks one element of a list. pydantic
(2.14.3, strict, `allow_inf_nan=False`) accepts the same values, except also 1 as `Literal[True]`, but would be another
dependency of the core package, and its errors would have to be formatted as one line.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_MAX_LENGTH = 60  # characters of a formatted value


def type_errors(values: Any) -> list[str]:
    """Return a message for each field of a dataclass instance whose value does not have the field's type.

    An int is accepted as a float, a bool as neither; numbers must be finite.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: int
    ...     rate: float | None = None
    >>> type_errors(Sizes(8, 1)), type_errors(Sizes("8", float("nan")))
    ([], ["width must be an int, got '8'", 'rate must be a finite float or None, got nan'])
    """
    hints = get_type_hints(type(values))
    by_name = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return [
        f"{name} must be {_type_name(hints[name])}, got {brief(value)}"
        for name, value in by_name.items()
        if not _is(value, hints[name])
    ]


def from_json(kind: type[T], values: Any) -> T:
    """Return a dataclass with the values of a JSON object, which may have other keys.

    Args:
      kind: The dataclass. A field without a default must be in the object.
      values: What a JSON file contains.

    Raises:
      ValueError: It is not an object, or a value is missing or of another type.

    Example:
      >>> from dataclasses import dataclass
      >>> @dataclass
      ... class Sizes:
      ...     width: int
      >>> from_json(Sizes, {"width": 8, "depth": "x"})
      Sizes(width=8)
      >>> from_json(Sizes, {"width": "8"})
      Traceback (most recent call last):
      ValueError: width must be an int, got '8'
    """
    if not isinstance(values, dict):
        raise ValueError(f"an object is expected, got {brief(values)}")
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    for field in fields:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ValueError(f"{field.name} is missing")
    read = kind(**{field.name: values[field.name] for field in fields if field.name in values})
    if wrong := type_errors(read):
        raise ValueError(wrong[0])
    return read


def brief(value: Any) -> str:
    """Format a value as Python writes it, abbreviated to one short line."""
    text = str(value) if isinstance(value, int | float | Path) else repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


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


_TYPE_NAMES = {int: "an int", float: "a finite float", bool: "a bool", str: "a string", Path: "a path"}


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in get_args(hint))
    if isinstance(hint, type) and hint in _TYPE_NAMES:
        return _TYPE_NAMES[hint]
    return "None" if hint is types.NoneType else str(getattr(hint, "__name__", hint))
