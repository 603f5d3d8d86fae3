"""Validate the values of a dataclass against the types and bounds of its fields: values from a file may be anything."""

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxtrain.errors import UserError

T = TypeVar("T")

_MAX_LENGTH = 60  # characters of a formatted value


class Bound(NamedTuple):
    """What a value must be: the metadata of a field's `Annotated` type.

    Attributes:
      holds: Whether a value is within the bound.
      must: The bound in words, after "must".
      remedy: What to use instead; "" if the bound says it.

    Example:
      >>> even = Bound(lambda x: x % 2 == 0, "be even", "add 1")
      >>> even.message("width", 3)
      'width must be even, got 3: add 1'
    """

    holds: Callable[[Any], bool]
    must: str
    remedy: str = ""

    def message(self, name: str, value: Any) -> str:
        """Return the message for a value that is out of bounds."""
        return f"{name} must {self.must}, got {brief(value)}" + (f": {self.remedy}" if self.remedy else "")

    def check(self, name: str, value: Any) -> None:
        """Raise `UserError` for a value that is out of bounds."""
        if not self.holds(value):
            raise UserError(self.message(name, value))


def at_least(least: float, remedy: str = "") -> Bound:
    """Return the bound of numbers that are not below `least`."""
    return Bound(lambda x: bool(x >= least), f"be at least {least:,}", remedy)


def at_most(most: float, remedy: str = "") -> Bound:
    """Return the bound of numbers that are not above `most`."""
    return Bound(lambda x: bool(x <= most), f"be at most {most:,}", remedy)


# The smallest and largest normal numbers of float32.
_SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Updates are counted in int32. Larger sizes of a model are mistakes, which would be traced or allocated.
_MOST = at_most(2**31 - 1)

Count = Annotated[int, at_least(1), _MOST]
"""A number of updates, rows or files."""
CountOrZero = Annotated[int, at_least(0), _MOST]
"""The same, or none."""
Width = Annotated[int, at_least(1), at_most(2**20)]
"""A size of a model or a batch."""
Depth = Annotated[int, at_least(1), at_most(1000)]
"""A number of layers."""
Share = Annotated[float, Bound(lambda x: 0 < x < 1, "be in (0, 1)")]
"""A part of a whole."""
Rate = Annotated[float, Bound(lambda x: 0 <= x < 1, "be in [0, 1)")]
"""A probability of dropout, or a decay."""
Positive = Annotated[float, Bound(lambda x: _SMALLEST <= x <= LARGEST, "be positive and representable in float32")]
"""A number that float32, the precision of updates, does not round to 0 or inf."""
NotNegative = Annotated[float, Bound(lambda x: 0 <= x <= LARGEST, "be at least 0 and representable in float32")]
"""A number of at least 0."""


def bounds(kind: type) -> dict[str, tuple[Bound, ...]]:
    """Return the bounds of a dataclass's fields by name.

    A field that a subclass defines again, with another default, keeps the bounds of its base unless it has its own.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: Width
    ...     rate: Rate | None = None
    >>> [bound.must for bound in bounds(Sizes)["width"]]
    ['be at least 1', 'be at most 1,048,576']
    """
    found: dict[str, tuple[Bound, ...]] = {}
    for base in kind.__mro__:
        found = {**_own_bounds(base), **found}
    return found


@functools.cache
def _own_bounds(kind: type) -> dict[str, tuple[Bound, ...]]:
    own = inspect.get_annotations(kind)
    hints = get_type_hints(kind, include_extras=True) if own else {}
    return {name: found for name in own if (found := _bounds_in(hints[name]))}


def _bounds_in(hint: Any) -> tuple[Bound, ...]:
    if get_origin(hint) is Annotated:
        return (*(x for x in hint.__metadata__ if isinstance(x, Bound)), *_bounds_in(get_args(hint)[0]))
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(bound for part in get_args(hint) for bound in _bounds_in(part))
    return ()


def field_errors(values: Any) -> list[str]:
    """Return a message for each field of a dataclass instance that has another type, or is out of bounds.

    None, where a field may be None, is within all bounds of `Annotated[int, …] | None`.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: Width
    ...     rate: Rate | None = None
    >>> field_errors(Sizes("8")) + field_errors(Sizes(0, 1.0)) + field_errors(Sizes(8))
    ["width must be an int, got '8'", 'width must be at least 1, got 0', 'rate must be in [0, 1), got 1.0']
    """
    if wrong := type_errors(values):
        return wrong
    errors = []
    for name, of_field in bounds(type(values)).items():
        value = getattr(values, name, None)
        broken = [bound for bound in of_field if value is not None and not bound.holds(value)]
        errors += [bound.message(name, value) for bound in broken[:1]]
    return errors


def type_errors(values: Any) -> list[str]:
    """Return a message for each field of a dataclass instance whose value does not have the field's type.

    An int is accepted as a float, a bool as neither; numbers must be finite.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Sizes:
    ...     width: int
    ...     rate: float | None = None
    >>> type_errors(Sizes(8, 1)) + type_errors(Sizes("8", float("nan")))
    ["width must be an int, got '8'", 'rate must be a finite float or None, got nan']
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
    return abbreviated(str(value) if isinstance(value, int | float | Path) else repr(value))


def abbreviated(text: str) -> str:
    """Return a text, its end left out if it is long."""
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
