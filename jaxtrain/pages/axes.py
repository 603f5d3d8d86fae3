"""Axes: where a value is drawn, and which ticks are labeled."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

HUGE = 1e300
"""Values are drawn up to this magnitude, since the largest floats have no finite distance."""


@dataclass(frozen=True)
class Axis:
    """An axis: `place` maps a value to its share of the length, 0 to 1; `ticks` are shares with labels."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def between(
    low: float, high: float, ticks: Iterable[float] = (), label: Callable[[float], str] = "{:,.0f}".format
) -> Axis:
    """Return a linear axis with exactly these ends; values beyond them are drawn at the ends.

    >>> between(0, 8, [0, 4]).ticks
    [(0.0, '0'), (0.5, '4')]
    """

    def place(value: float) -> float:
        return (min(max(value, low), high) - low) / (high - low or 1.0)

    return Axis(place, [(place(tick), label(tick)) for tick in ticks])


def linear(values: Iterable[float], label: Callable[[float], str] | None = None) -> Axis:
    """Return an axis over the finite values, with round numbers at both ends."""
    drawn = _drawn(values) or [0.0]
    ticks = _round_numbers(min(drawn), max(drawn), most=4)
    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    wide = max(-ticks[0], ticks[-1]) >= 1e5 or decimals > 5
    return between(ticks[0], ticks[-1], ticks, label or (lambda t: f"{t:.2g}" if wide else f"{t:.{decimals}f}"))


def logarithmic(
    values: Iterable[float],
    base: int = 10,
    label: Callable[[float], str] | None = None,
    digits: Sequence[int] = (1,),
) -> Axis:
    """Return an axis with a digit times a power at both ends, and a separate place below them for zero, if needed."""
    drawn = _drawn(values)
    powers = [math.log(v, base) for v in drawn if v > 0] or [0.0]
    first, last = math.floor(min(powers) + 1e-9), math.ceil(max(powers) - 1e-9)
    marks = [power + math.log(digit, base) for power in range(first, last + (first == last) + 1) for digit in digits]
    low = max(mark for mark in marks if mark <= min(powers) + 1e-9)
    high = min(mark for mark in marks if mark > low and mark >= max(powers) - 1e-9)
    bottom = low - 0.2 * (high - low) * any(v <= 0 for v in drawn)

    def place(value: float) -> float:
        power = math.log(_clipped(value), base) if value > 0 else bottom
        return (power - bottom) / (high - bottom)

    def default(power: float) -> str:
        return f"1e{power:.0f}" if base == 10 else f"{float(base) ** power:g}"

    marked = [mark for mark in marks if low <= mark <= high]
    ticks = [
        ((mark - bottom) / (high - bottom), label(float(base) ** mark) if label else default(mark))
        for mark in marked[:: -(-(len(marked) - 1) // 5)]
    ]
    return Axis(place, ticks if bottom == low else [(0.0, "0"), *ticks])


def whole(first: int, last: int) -> list[int]:
    """Return a few integers from `first` to `last`.

    >>> whole(1, 100)
    [1, 20, 40, 60, 80, 100]
    """
    ticks = _round_numbers(first, max(last, first + 1), most=5)
    return sorted({first, *(int(tick) for tick in ticks if tick == int(tick) and first <= tick <= last)})


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose an interval, with at most `most` steps."""
    if high - low <= max(1e-9 * max(-low, high), 1e-290):  # a point
        room = max(0.1 * max(-low, high), 1e-280) if low or high else 1.0
        low, high = low - room, high + room
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (size * power for size in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _drawn(values: Iterable[float]) -> list[float]:
    return [_clipped(v) for v in values if math.isfinite(v)]


def _clipped(value: float) -> float:
    return min(max(float(value), -HUGE), HUGE)  # of NumPy's float32 as well
