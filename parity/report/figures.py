"""The figures of the page: losses, gradients and loss scales as SVG paths."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from parity.report.axes import Axis, linear, logarithmic
from parity.report.page_case import PageCase, Series

LEVELS = 12
"""Number of colors of the heat strip."""
NAMED = 16
"""Largest number of parameters named under the strip; of more, the worst are listed."""
STOPS = 200
"""Largest number of places of a curve that can be pointed at."""
SIDE = 1000
"""Side of the square that curves are drawn in; the page stretches it to its width."""


@dataclass(frozen=True)
class _Panel:
    """Curves, as (CSS class, SVG path), over one axis; `floor` is a height with its label."""

    title: str
    ticks: list[tuple[float, str]]
    curves: list[tuple[str, str]]
    floor: tuple[float, str] | None = None


@dataclass(frozen=True)
class _Figure:
    """Panels over one horizontal axis of `count` equal slots.

    `strips` has a color for each slot, by name; `stops` are places to point at, as (first slot, slots, text); `ticks`
    are (slot, label); `key` is (CSS class, meaning) of the curves; `notes` are lines about what the drawing cannot
    show.
    """

    title: str
    count: int
    panels: list[_Panel]
    stops: list[tuple[int, int, str]]
    ticks: list[tuple[int, str]]
    label: str
    key: list[tuple[str, str]]
    notes: list[str]
    strips: Mapping[str, Sequence[str]] | None = None
    names: Sequence[str] = ()


def loss_figure(case: PageCase) -> _Figure:
    """Return the figure of the losses and their relative difference, by step."""
    theirs, ours, course = _floats(case.torch_losses), _floats(case.jax_losses), case.trajectory
    apart = [abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(ours, theirs, strict=False)]
    one_ulp: list[float] = []
    if course is not None:
        apart, one_ulp = _floats(course.apart), _floats(course.one_ulp)
    loss, difference = linear([*theirs, *ours]), logarithmic([*apart, *one_ulp, case.floor])
    steps = max(len(theirs), len(ours))
    differences = [("apart", _path(apart, difference.place, steps))]
    if course is not None:
        differences.insert(0, ("ulp", _path(one_ulp, difference.place, steps)))
    return _Figure(
        title="Loss",
        count=steps,
        panels=[
            _Panel("loss", loss.ticks, _both(theirs, ours, loss.place, steps)),
            _Panel(
                "relative difference" if course is None else "largest relative difference so far",
                difference.ticks,
                differences,
                _floor(case, difference),
            ),
        ],
        stops=_stops(
            f"step {i}: PyTorch {_loss(b)}, JAX {_loss(a)}, difference {number(d)}"
            + (f", one ulp's {number(one_ulp[i - 1])}" if one_ulp else "")
            for i, (a, b, d) in enumerate(zip(ours, theirs, apart, strict=False), start=1)
        ),
        ticks=[(i - 1, str(i)) for i in whole(1, steps)],
        label="step",
        key=[
            ("torch", "PyTorch"),
            ("jax", "JAX"),
            *([("apart", "JAX's difference"), ("ulp", "PyTorch's, from weights one ulp off")] if one_ulp else []),
        ],
        notes=_gaps("loss", theirs, ours, first=1),
    )


def scale_figure(case: PageCase) -> _Figure:
    """Return the figure of the loss scales, by step."""
    theirs, ours = _floats(case.torch_scales), _floats(case.jax_scales)
    axis, moments = logarithmic([*theirs, *ours], base=2), max(len(theirs), len(ours))
    return _Figure(
        title="Loss scale",
        count=moments,
        panels=[_Panel("scale", axis.ticks, _both(theirs, ours, axis.place, moments, stepped=True))],
        stops=_stops(
            f"{f'after step {i}' if i else 'at the start'}: PyTorch {b:g}, JAX {a:g}"
            for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
        ),
        ticks=[(i, str(i)) for i in whole(0, moments - 1)],
        label="after step",
        key=[("torch", "PyTorch"), ("jax", "JAX")],
        notes=_gaps("loss scale", theirs, ours, first=0),
    )


def gradient_figure(case: PageCase) -> _Figure:
    """Return the figure of the relative errors of the first gradient, by parameter."""
    names, theirs = list(case.grad_errors), case.torch_grad_errors
    errors = {"JAX": [float(case.grad_errors[name]) for name in names]}
    if theirs is not None:
        errors = {"PyTorch": [float(theirs.get(name, math.nan)) for name in names], **errors}
    axis = logarithmic([*(e for row in errors.values() for e in row), case.floor])
    curves = [
        ({"JAX": "dots jax", "PyTorch": "dots torch"}[side], _path(row, axis.place, len(names), joined=False))
        for side, row in errors.items()
    ]
    return _Figure(
        title="First gradient, by parameter",
        count=len(names),
        panels=[_Panel("relative error", axis.ticks, curves, _floor(case, axis))],
        stops=[
            (i, 1, ", ".join([name, *(f"{side} {number(row[i])}" for side, row in errors.items())]))
            for i, name in enumerate(names)
        ],
        ticks=[],
        label="parameters, from input to output",
        key=[
            (css, f"{side} to {'PyTorch' if theirs is None else 'float64'}")
            for side, css in (("PyTorch", "dots torch"), ("JAX", "dots jax"))
            if side in errors
        ],
        notes=[
            f"{side}: not finite in {len(broken)} of {len(names)}, first {names[broken[0]]}"
            for side, row in errors.items()
            if (broken := [i for i, e in enumerate(row) if not math.isfinite(e)])
        ],
        strips={side: [level(e, case.floor) for e in row] for side, row in errors.items()},
        names=names if len(names) <= NAMED else (),
    )


def _range(floor: float) -> tuple[float, float]:
    """The decades that the colors span, the same for all checks of a precision, so that they are comparable."""
    low = math.log10(floor) - 1
    return low, max(0.0, low + 2)


def level(error: float, floor: float) -> str:
    """CSS class of the color of an error."""
    if not math.isfinite(error):
        return "lost"
    low, high = _range(floor)
    share = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
    return f"t{min(max(int(share * LEVELS), 0), LEVELS - 1)}"


def legend(case: PageCase) -> dict[str, Any]:
    """Ends of the color scale and the place of the floor."""
    low, high = _range(case.floor)
    return {"low": 10**low, "high": 10**high, "floor": 1 / (high - low), "label": f"{case.precision} rounding"}


def _both(
    theirs: Sequence[float], ours: Sequence[float], place: Callable[[float], float], count: int, stepped: bool = False
) -> list[tuple[str, str]]:
    """PyTorch's curve, drawn broad, and JAX's, drawn thin on top, so that both are visible where they coincide."""
    return [
        ("torch", _path(theirs, place, count, stepped=stepped)),
        ("jax", _path(ours, place, count, stepped=stepped)),
    ]


def _path(
    values: Sequence[float],
    place: Callable[[float], float],
    count: int,
    *,
    joined: bool = True,
    stepped: bool = False,
) -> str:
    """The curve through the middles of `count` slots, or its points; interrupted where values are not finite."""
    path, down = [], False
    for i, value in enumerate(values):
        if not math.isfinite(value):
            down = False
            continue
        x, y = f"{(i + 0.5) / count * SIDE:.5g}", f"{(1 - place(value)) * SIDE:.4g}"
        if not (down and joined):
            path.append(f"M{x} {y}h0")  # round line caps draw a point if no other follows
        else:
            path.append(f"H{x}V{y}" if stepped else f"L{x} {y}")
        down = True
    return "".join(path)


def _floor(case: PageCase, axis: Axis) -> tuple[float, str]:
    return axis.place(case.floor), f"{case.precision} rounding {number(case.floor)}"


def _stops(texts: Iterable[str]) -> list[tuple[int, int, str]]:
    lines = list(texts)
    stride = -(-len(lines) // STOPS)
    return [(i, min(stride, len(lines) - i), lines[i]) for i in range(0, len(lines), stride or 1)]


def whole(first: int, last: int) -> list[int]:
    """A few integers from `first` to `last`."""
    ticks = MaxNLocator(5, integer=True).tick_values(first, max(last, first + 1))
    return sorted({first, *(int(t) for t in ticks if first <= t <= last)})


def _gaps(what: str, theirs: Sequence[float], ours: Sequence[float], first: int) -> list[str]:
    return [
        f"{whose} {what} is not finite at {len(broken)} of {len(series)} steps, first at step {broken[0]}"
        for whose, series in (("PyTorch's", theirs), ("JAX's", ours))
        if (broken := [i for i, v in enumerate(series, start=first) if not math.isfinite(v)])
    ]


def _floats(series: Series) -> list[float]:
    return [float(v) for v in series]


def badness(error: float) -> float:
    """Return a key that sorts errors, with those that are not finite as the largest."""
    return error if math.isfinite(error) else math.inf


def _loss(value: float) -> str:
    return f"{value:.6g}"


def number(value: float | None) -> str:
    """A distance in the format of the terminal's table; empty if there is none."""
    return "" if value is None else f"{value:.1e}" if math.isfinite(value) else "not finite"
