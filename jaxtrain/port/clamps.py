"""Parameters that a script clamps by hand after an update, as a part of the update."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.port.calls import Call, Interval, Value
from jaxtrain.torch_import import Line

_BOUNDS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
"""The arguments after the tensor, by the name of a function."""


Bounds = tuple[float | None, float | None]
"""The lower and the upper bound; None for none."""


class Clamp(NamedTuple):
    """Bounds of a parameter.

    Attributes:
      minimum: The lower one; None for none.
      maximum: The upper one; None for none.
      line: The line of the script.
    """

    minimum: float | None
    maximum: float | None
    line: Line

    @property
    def bounds(self) -> Bounds:
        """Both bounds."""
        return self.minimum, self.maximum

    def after(self, other: "Clamp | None") -> "Clamp":
        """Return the clamp that does what this one does after another one."""
        if other is None:
            return self
        low, high = (_clip(x, self.bounds) for x in (_low(other.minimum), _high(other.maximum)))
        return Clamp(low if math.isfinite(low) else None, high if math.isfinite(high) else None, self.line)


def _low(x: float | None) -> float:
    return -math.inf if x is None else x


def _high(x: float | None) -> float:
    return math.inf if x is None else x


def _clip(x: float, bounds: Bounds) -> float:
    return min(max(x, _low(bounds[0])), _high(bounds[1]))


def without_clamps(interval: Interval, parameters: Collection[int]) -> tuple[Interval, dict[int, Clamp]]:
    """Return an interval without the calls that clamp whole parameters in place, and these parameters' bounds.

    Args:
      interval: What was called up to a loss.
      parameters: Identities of the parameters that optimizers update.
    """
    same = {value: key for value, key in interval.identities.items() if key in parameters}
    found: dict[int, Clamp] = {}
    clamped: dict[Value, tuple[int, Clamp]] = {}  # tensors that are a clamped parameter
    taken = set[int]()
    for call in interval.calls:
        name, read = getattr(call.function, "__name__", ""), call.args[0] if call.args else None
        if call.reads_data or name == "detach":
            same |= {value: same[read] for _, value in call.results if read in same}
        clamp = _clamp(call, name.removesuffix("_"))
        if clamp is not None and read in same and call.writes == (read,):
            found[same[read]] = clamp.after(found.get(same[read]))
            taken.add(id(call))
        elif clamp is not None and read in same:
            clamped |= {value: (same[read], clamp) for _, value in call.results}
        elif (call.sets_data or name == "copy_") and _source(call) in clamped and read in same:
            key, clamp = clamped[_source(call)]
            if key == same[read]:
                found[key] = clamp.after(found.get(key))
                taken.add(id(call))
    if not taken:
        return interval, {}
    calls = [call for call in interval.calls if id(call) not in taken]
    lines = {clamp.line for clamp in found.values()}
    return interval._replace(calls=tuple(_used(calls, lines, interval.loss))), found


def _clamp(call: Call, name: str) -> Clamp | None:
    """Return the bounds of a call that clamps its first argument to numbers."""
    if name not in _BOUNDS or not isinstance(call.args[0] if call.args else None, Value):
        return None
    given: dict[str, Any] = {**dict(zip(_BOUNDS[name], call.args[1:], strict=False)), **call.kwargs}
    if not given or any(key not in ("min", "max") or not isinstance(x, int | float | None) for key, x in given.items()):
        return None
    return Clamp(given.get("min"), given.get("max"), call.line)


def _source(call: Call) -> Any:
    return call.args[1] if len(call.args) > 1 else None


def _used(calls: Sequence[Call], lines: Collection[Line], loss: Value) -> Iterator[Call]:
    """Yield calls without those of some lines that nothing reads and that change nothing."""
    read = {loss, *(value for call in calls for value in call.reads())}
    for call in calls:
        is_used = bool(call.writes) or not read.isdisjoint(value for _, value in call.results)
        if call.line not in lines or is_used:
            yield call


def bounds(clamps: Mapping[int, Clamp], of: Collection[int]) -> dict[int, Bounds]:
    """Return the bounds of some parameters, by their identities.

    Args:
      clamps: Clamps of parameters.
      of: Identities of parameters.
    """
    return {key: clamp.bounds for key, clamp in clamps.items() if key in of}
