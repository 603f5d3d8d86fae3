"""The charts of the page: losses, gradients and loss scales."""

import math
from collections.abc import Iterator, Sequence

from jaxtrain.pages import Cell, Chart, Panel, Stop, Strip, between, curve, linear, logarithmic, whole
from parity.report.page_case import PageCase, Series

STOPS = 200
"""Largest number of places of a curve that can be pointed at."""
TORCH, JAX, APART, ULP = "c1 broad", "c0", "c3", "c1 dotted"
"""PyTorch's curve is drawn broad, and JAX's thin on top, so that both are visible where they coincide."""
_Points = list[tuple[int, float]]


def loss_chart(case: PageCase) -> Chart:
    """Return the chart of the losses and their relative difference, by step."""
    theirs, ours, course = _points(case.torch_losses, 1), _points(case.jax_losses, 1), case.verdict.trajectory
    if course is None:
        apart = [(i, abs(a - b) / abs(b) if b else abs(a - b)) for (i, a), (_, b) in zip(ours, theirs, strict=False)]
    else:
        apart = _points(course.apart, 1)
    one_ulp = [] if course is None else _points(course.one_ulp, 1)
    steps = max(len(theirs), len(ours))
    x = between(0.5, steps + 0.5, whole(1, steps))
    loss, difference = linear(_values(theirs, ours)), logarithmic([*_values(apart, one_ulp), case.floor])
    differences = [*([(ULP, curve(one_ulp, x, difference))] if one_ulp else []), (APART, curve(apart, x, difference))]
    so_far = "relative difference" if course is None else "largest relative difference so far"
    texts = (
        f"step {i}: PyTorch {b:.6g}, JAX {a:.6g}, difference {number(d)}"
        + (f", one ulp's {number(one_ulp[i - 1][1])}" if one_ulp else "")
        for (i, a), (_, b), (_, d) in zip(ours, theirs, apart, strict=False)
    )
    ulp_key = [(APART, "JAX's difference"), (ULP, "PyTorch's, from weights one ulp off")]
    return Chart(
        "Loss",
        x,
        [
            Panel("loss", loss, [(TORCH, curve(theirs, x, loss)), (JAX, curve(ours, x, loss))]),
            Panel(so_far, difference, differences, [_floor(case)]),
        ],
        label="step",
        key=[(TORCH, "PyTorch"), (JAX, "JAX"), *(ulp_key if one_ulp else [])],
        stops=_stops([*texts], first=1),
        notes=[*_gaps("loss", theirs, ours)],
    )


def scale_chart(case: PageCase) -> Chart:
    """Return the chart of the loss scales, by step."""
    theirs, ours = _points(case.torch_scales, 0), _points(case.jax_scales, 0)
    last = max(len(theirs), len(ours)) - 1
    x, y = between(-0.5, last + 0.5, whole(0, last)), logarithmic(_values(theirs, ours), base=2)
    texts = (
        f"{f'after step {i}' if i else 'at the start'}: PyTorch {b:g}, JAX {a:g}"
        for (i, a), (_, b) in zip(ours, theirs, strict=False)
    )
    return Chart(
        "Loss scale",
        x,
        [Panel("scale", y, [(TORCH, curve(theirs, x, y, "stepped")), (JAX, curve(ours, x, y, "stepped"))])],
        label="after step",
        key=[(TORCH, "PyTorch"), (JAX, "JAX")],
        stops=_stops([*texts], first=0),
        notes=[*_gaps("loss scale", theirs, ours)],
    )


def gradient_chart(case: PageCase) -> Chart:
    """Return the chart of the relative errors of the first gradient, by parameter."""
    names, theirs = [*case.grad_errors], case.torch_grad_errors
    errors = {"JAX": [float(case.grad_errors[name]) for name in names]}
    if theirs is not None:
        errors = {"PyTorch": [float(theirs.get(name, math.nan)) for name in names], **errors}
    x = between(-0.5, len(names) - 0.5)
    y = logarithmic([*(e for row in errors.values() for e in row), case.floor])
    low, high = _range(case.floor)
    css = {"PyTorch": f"{TORCH} dots", "JAX": f"{JAX} dots"}
    cells = {side: [_cell(i, error, case.floor) for i, error in enumerate(row)] for side, row in errors.items()}
    return Chart(
        "First gradient, by parameter",
        x,
        [
            *(Strip(side, row, height=22) for side, row in cells.items()),
            Panel(
                "relative error",
                y,
                [(css[side], curve(enumerate(row), x, y, "dots")) for side, row in errors.items()],
                [_floor(case)],
            ),
        ],
        label="parameters, from input to output",
        key=[
            *((css[side], f"{side} to {'PyTorch' if theirs is None else 'float64'}") for side in errors),
            ("heat broad", f"{10**low:.1e} to {10**high:.1e}"),
        ],
        stops=[
            Stop(i - 0.5, i + 0.5, ", ".join([name, *(f"{side} {number(row[i])}" for side, row in errors.items())]))
            for i, name in enumerate(names)
        ],
        notes=[
            f"{side}: not finite in {len(broken)} of {len(names)}, first {names[broken[0]]}"
            for side, row in errors.items()
            if (broken := [i for i, e in enumerate(row) if not math.isfinite(e)])
        ],
    )


def _range(floor: float) -> tuple[float, float]:
    """The decades that the colors span, the same for all checks of a precision, so that they are comparable."""
    low = math.log10(floor) - 1
    return low, max(0.0, low + 2)


def _cell(i: int, error: float, floor: float) -> Cell:
    if not math.isfinite(error):
        return Cell(i - 0.5, i + 0.5, "lost")
    low, high = _range(floor)
    share = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
    return Cell(i - 0.5, i + 0.5, "heat", min(max(share, 0.05), 0.9))


def _points(series: Series, first: int) -> _Points:
    return [(i, float(value)) for i, value in enumerate(series, start=first)]


def _values(*series: _Points) -> list[float]:
    return [value for points in series for _, value in points]


def _floor(case: PageCase) -> tuple[float, str]:
    return case.floor, f"{case.precision} rounding {number(case.floor)}"


def _stops(texts: Sequence[str], first: int) -> list[Stop]:
    stride = -(-len(texts) // STOPS) or 1
    starts = range(0, len(texts), stride)
    return [Stop(i + first - 0.5, min(i + stride, len(texts)) + first - 0.5, texts[i]) for i in starts]


def _gaps(what: str, theirs: _Points, ours: _Points) -> Iterator[str]:
    for whose, points in (("PyTorch's", theirs), ("JAX's", ours)):
        if broken := [step for step, value in points if not math.isfinite(value)]:
            yield f"{whose} {what} is not finite at {len(broken)} of {len(points)} steps, first at step {broken[0]}"


def badness(error: float) -> float:
    """Return a key that sorts errors, with those that are not finite as the largest."""
    return error if math.isfinite(error) else math.inf


def number(value: float | None) -> str:
    """A distance in the format of the terminal's table; empty if there is none."""
    return "" if value is None else f"{value:.1e}" if math.isfinite(value) else "not finite"
