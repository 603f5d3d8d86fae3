"""Axes of the page's figures: where a value is drawn, and which ticks are labeled."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

HUGE = 1e300
"""Values are drawn up to this magnitude, since the largest floats have no finite distance."""


@dataclass(frozen=True)
class Axis:
    """An axis: `place` maps a value to its height, 0 to 1; `ticks` are heights with labels."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear(values: Iterable[float]) -> Axis:
    """Return an axis over the finite values, with round numbers at both ends."""
    drawn = _drawn(values) or [0.0]
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(min(drawn), max(drawn))
    low, step = ticks[0], ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))

    def place(value: float) -> float:
        return float((_clipped(value) - low) / (ticks[-1] - low))

    wide = max(-low, ticks[-1]) >= 1e5
    return Axis(place, [(place(t), f"{t:.2g}" if wide else f"{t:.{decimals}f}") for t in ticks])


def logarithmic(values: Iterable[float], base: int = 10) -> Axis:
    """Return an axis with integer powers at both ends, and a separate place below them for zero, if there is one."""
    drawn = _drawn(values)
    powers = [math.log(v, base) for v in drawn if v > 0] or [0.0]
    low, high = math.floor(min(powers) + 1e-9), math.ceil(max(powers) - 1e-9)
    high += low == high
    stride = -(-(high - low) // 5)
    bottom = low - 0.2 * (high - low) * any(v <= 0 for v in drawn)

    def place(value: float) -> float:
        power = math.log(_clipped(value), base) if value > 0 else bottom
        return (power - bottom) / (high - bottom)

    ticks = [(place(float(base) ** p), f"1e{p}" if base == 10 else f"{2.0**p:g}") for p in range(low, high + 1, stride)]
    return Axis(place, ticks if bottom == low else [(0.0, "0"), *ticks])


def _drawn(values: Iterable[float]) -> list[float]:
    return [_clipped(v) for v in values if math.isfinite(v)]


def _clipped(value: float) -> float:
    return min(max(value, -HUGE), HUGE)
