"""The picture of `jaxtrain plan --nodes`: MFU and throughput by the number of GPUs, as an SVG."""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from jaxtrain.observe import format_count
from jaxtrain.planning import Growth, MeshCost

_COLORS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#a16207", "#be123c")
_INK, _FAINT = "#52525b", "#e4e4e7"
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 320, 240, 64, 64, 96


class _Line(NamedTuple):
    label: str
    color: str
    points: Sequence[tuple[float, float]]
    compiled: Sequence[bool]


class _Panel(NamedTuple):
    """A chart over the number of GPUs, on a logarithmic axis."""

    title: str
    lines: Sequence[_Line]
    ticks: Sequence[float]
    format_tick: Callable[[float], str]
    is_log: bool
    ideal: Sequence[tuple[float, float]] = ()


def draw_growths(title: str, found: Sequence[Growth], own: MeshCost, unit: str) -> str:
    """Return an SVG of two charts: MFU with the rows of a GPU fixed, and throughput with the batch fixed.

    Args:
      title: The title.
      found: How the mesh grows along its axes.
      own: The mesh that all of them contain.
      unit: Unit of the throughput, such as "tokens".
    """
    axes = list(dict.fromkeys(growth.axis for growth in found))
    color = dict(zip(axes, _COLORS, strict=False))

    def lines(scaling: str, value: Callable[[MeshCost], float]) -> list[_Line]:
        return [
            _Line(
                growth.axis,
                color.get(growth.axis, _INK),
                [(float(cost.gpus), value(cost)) for cost in growth.costs],
                [dict(cost.program) == dict(cost.mesh) for cost in growth.costs],
            )
            for growth in found
            if growth.scaling == scaling and growth.costs
        ]

    strong = lines("strong", lambda cost: cost.units_per_s)
    most = max([cost.gpus for growth in found if growth.scaling == "strong" for cost in growth.costs], default=own.gpus)
    ideal = [(float(gpus), own.units_per_s * gpus / own.gpus) for gpus in (own.gpus, most)]
    values = [y for line in strong for _, y in line.points] + [y for _, y in ideal]
    panels = (
        _Panel(
            "rows of a GPU fixed: MFU",
            lines("weak", lambda cost: cost.mfu),
            [0, 0.2, 0.4, 0.6, 0.8, 1],
            "{:.0%}".format,
            False,
        ),
        _Panel(f"batch fixed: {unit}/s", strong, _ticks(min(values), max(values)), format_count, True, ideal),
    )
    width, height = _LEFT + 2 * (_WIDTH + _GAP), _TOP + _HEIGHT + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" fill="{_INK}">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += _draw(panel, _LEFT + i * (_WIDTH + _GAP))
    note = "filled: compiled for that mesh; hollow: extrapolated; dashed: ideal"
    parts.append(f'<text x="{_LEFT}" y="{height - 8}" fill="{_INK}" font-size="11">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw(panel: _Panel, left: float) -> Iterator[str]:
    gpus = [x for line in panel.lines for x, _ in line.points] or [1.0, 2.0]
    first, last = math.log2(min(gpus)), max(math.log2(max(gpus)), math.log2(min(gpus)) + 1)
    low, high = panel.ticks[0], panel.ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(y / low) / math.log(high / low) if panel.is_log else (y - low) / (high - low)
        return left + _WIDTH * (math.log2(x) - first) / (last - first), _TOP + _HEIGHT * (1 - share)

    yield f'<text x="{left}" y="{_TOP - 16}" fill="{_INK}" font-weight="bold">{escape(panel.title)}</text>'
    for tick in panel.ticks:
        _, y = place(2**first, tick)
        yield f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}"/>'
        yield (
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_INK}">'
            f"{escape(panel.format_tick(tick))}</text>"
        )
    step = 1 if last - first <= 6 else 2
    for power in range(round(first), round(last) + 1, step):
        x, _ = place(2.0**power, high)
        yield f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle" fill="{_INK}">{2**power:,}</text>'
    yield (f'<text x="{left + _WIDTH}" y="{_TOP + _HEIGHT + 34}" text-anchor="end" fill="{_INK}">GPUs</text>')
    if panel.ideal:
        yield f'<polyline points="{_path(place, panel.ideal)}" fill="none" stroke="{_INK}" stroke-dasharray="4 4"/>'
    ends: list[float] = []
    for line in sorted(panel.lines, key=lambda line: -line.points[-1][1]):
        yield f'<polyline points="{_path(place, line.points)}" fill="none" stroke="{line.color}" stroke-width="2"/>'
        for point, is_compiled in zip(line.points, line.compiled, strict=True):
            x, y = place(*point)
            fill = line.color if is_compiled else "white"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{line.color}"/>'
        x, y = place(*line.points[-1])
        while any(abs(y - other) < 13 for other in ends):
            y += 13
        ends.append(y)
        yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{line.color}">{escape(line.label)}</text>'


def _path(place: Callable[[float, float], tuple[float, float]], points: Sequence[tuple[float, float]]) -> str:
    return " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)


def _ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times powers of ten that enclose an interval."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    possible = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(i for i, tick in enumerate(possible) if tick <= low * (1 + 1e-9))
    last = min(i for i, tick in enumerate(possible) if tick >= high * (1 - 1e-9))
    return possible[first : max(last, first + 1) + 1]
