"""Charts: panels of curves and strips of cells over one horizontal axis, as part of a page or as an SVG file."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtrain.pages.axes import Axis
from jaxtrain.pages.page import PALETTE, STYLES, macros

_SIDE = 1000  # of the square that curves are drawn in, which is stretched to its panel
_TITLE, _GAP, _AXIS, _LINE = 20, 12, 20, 14  # pixels above a titled panel, below any panel, of labels, of texts


class Cell(NamedTuple):
    """A colored cell of a strip from `first` to `last` on the axis; `css` is one of `heat`, `bar` and `lost`."""

    first: float
    last: float
    css: str
    opacity: float = 1.0
    text: str = ""


class Region(NamedTuple):
    """A shaded part of the axis, with a text above it."""

    first: float
    last: float
    css: str
    text: str


class Stop(NamedTuple):
    """A part of the axis that can be pointed at, with the text that is then shown."""

    first: float
    last: float
    text: str


@dataclass(frozen=True)
class Strip:
    """A row of cells, with its name at the left and a note at the right."""

    name: str
    cells: Sequence[Cell]
    note: str = ""
    height: int = 14


@dataclass(frozen=True)
class Panel:
    """Curves over one vertical axis, as (CSS classes, SVG path); `references` are values to be marked, with labels."""

    title: str
    y: Axis
    curves: Sequence[tuple[str, str]]
    references: Sequence[tuple[float, str]] = ()
    height: int = 144


@dataclass(frozen=True)
class Chart:
    """Panels and strips, one below another.

    Attributes:
      title: The title.
      x: The horizontal axis.
      parts: Panels and strips.
      label: What the horizontal axis shows.
      key: (CSS classes, meaning) of the curves.
      stops: What can be pointed at.
      regions: What is shaded.
      notes: Lines about what the drawing cannot show.
      left: Pixels at the left for labels.
      right: Pixels at the right for notes.
    """

    title: str
    x: Axis
    parts: Sequence[Panel | Strip]
    label: str = ""
    key: Sequence[tuple[str, str]] = ()
    stops: Sequence[Stop] = ()
    regions: Sequence[Region] = ()
    notes: Sequence[str] = ()
    left: int = 64
    right: int = 24

    @property
    def placed(self) -> list[tuple[int, Panel | Strip]]:
        """The parts with their distances from the top, in pixels."""
        found, y = [], _LINE * len(self.regions)
        for part in self.parts:
            y += _TITLE if isinstance(part, Panel) and part.title else 0
            found.append((y, part))
            y += part.height + (1 if isinstance(part, Strip) else _GAP)
        return found

    @property
    def bottom(self) -> int:
        """Where the horizontal axis is."""
        top, last = self.placed[-1]
        return top + last.height

    @property
    def height(self) -> int:
        """Height with the labels of the axis."""
        return self.bottom + _AXIS * bool(self.x.ticks) + _AXIS * bool(self.label)

    @property
    def placed_key(self) -> Iterator[tuple[int, str, str]]:
        """The key in one line, with the distance of each entry from the left."""
        x = self.left
        for css, meaning in self.key:
            yield x, css, meaning
            x += 42 + round(6.3 * len(meaning))

    def __html__(self) -> str:
        """Return the figure of a page, as wide as its place."""
        return str(macros().figure(self))


def svg(charts: Sequence[Chart], width: int) -> str:
    """Return an SVG file of charts side by side, each `width` pixels wide."""
    top = 54 if any(chart.key for chart in charts) else 32
    height = top + max(chart.height for chart in charts) + 8
    style = (PALETTE + STYLES).replace(":root", "svg.chart")
    return str(macros().svg(charts, width, top, height, style))


def curve(
    points: Iterable[tuple[float, float]],
    x: Axis,
    y: Axis,
    drawn: Literal["joined", "stepped", "dots"] = "joined",
) -> str:
    """Return the SVG path of points; interrupted where a value is not finite."""
    path, down = [], False
    for at, value in points:
        if not math.isfinite(value):
            down = False
            continue
        px, py = _places(x.place(at), y.place(value))
        if not down or drawn == "dots":
            path.append(f"M{px} {py}h0")  # round line caps draw a point if no other follows
        else:
            path.append(f"H{px}V{py}" if drawn == "stepped" else f"L{px} {py}")
        down = True
    return "".join(path)


def band(points: Iterable[tuple[float, float, float]], x: Axis, y: Axis) -> str:
    """Return the SVG path of an area between two curves, as (place, low, high)."""
    found = [(x.place(at), y.place(low), y.place(high)) for at, low, high in points]
    edge = [*(_places(at, high) for at, _, high in found), *(_places(at, low) for at, low, _ in reversed(found))]
    return f"M{'L'.join(map(' '.join, edge))}Z"


def bars(found: Iterable[tuple[float, float, float]], x: Axis, y: Axis) -> str:
    """Return the SVG path of bars, as (first, last, value)."""
    path = []
    for first, last, value in found:
        (left, top), (right, _) = _places(x.place(first), y.place(value)), _places(x.place(last), 0)
        path.append(f"M{left} {_SIDE}V{top}H{right}V{_SIDE}z")
    return "".join(path)


def _places(x: float, y: float) -> tuple[str, str]:
    return f"{x * _SIDE:.5g}", f"{(1 - y) * _SIDE:.4g}"
