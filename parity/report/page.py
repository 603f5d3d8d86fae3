"""Results as one self-contained HTML page: the verdict first, then each check."""

import json
import linecache
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.ticker import MaxNLocator

from parity.compare import relative
from parity.divergence import Divergence, Line
from parity.report.result import Result
from parity.report.terminal import bars
from parity.source import import_path
from parity.trajectory import Trajectory

Series = Sequence[float] | np.ndarray
"""Numbers in the order of the steps, not necessarily finite."""

LEVELS = 12
"""Number of colors of the heat strip."""
NAMED = 16
"""Largest number of parameters named under the strip; of more, the worst are listed."""
STOPS = 200
"""Largest number of places of a curve that can be pointed at."""
HUGE = 1e300
"""Values are drawn up to this magnitude, since the largest floats have no finite distance."""
SIDE = 1000
"""Side of the square that curves are drawn in; the page stretches it to its width."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a source file from number `first` on; `line` is the number of the relevant one."""

    file: str
    line: int
    first: int
    lines: tuple[str, ...]

    @property
    def numbered(self) -> list[tuple[int, str]]:
        """The lines with their numbers, without common indentation."""
        return list(enumerate(textwrap.dedent("\n".join(self.lines)).split("\n"), start=self.first))


@dataclass(frozen=True)
class Difference:
    """The first operation without a counterpart: PyTorch's `op` in `module`, and the lines of both programs."""

    module: str
    op: str
    torch: Excerpt | None
    jax: Excerpt | None


@dataclass(frozen=True)
class PageCase:
    """One check as the page shows it: settings, verdict and runs.

    The losses have shape [steps], the scales [steps + 1]. `grad_errors` are the relative distances of JAX's first
    gradient from the reference, by parameter in the model's order. The reference is PyTorch in fp64 and the float64
    truth in lower precisions, where `torch_grad_errors` are PyTorch's own distances. `floor` is the rounding of the
    precision, greater than 0. `dropout` is the rate, if one was requested.
    """

    name: str
    precision: str
    accumulate: int
    remat: str
    optimizer: str
    steps: int
    seed: int
    passed: bool
    faults: tuple[str, ...]
    error_ratio: float | None
    loss_rel: float
    grad_rel_max: float
    grad_worst: str
    param_rel_max: float
    torch_losses: Series
    jax_losses: Series
    torch_scales: Series
    jax_scales: Series
    grad_errors: Mapping[str, float]
    torch_grad_errors: Mapping[str, float] | None
    floor: float
    difference: Difference | None
    trajectory: Trajectory | None = None
    dropout: float | None = None


def page_case(result: Result) -> PageCase:
    """Return the page's data of a check."""
    verdict, settings = result.verdict, result.settings
    ours, theirs, truth = result.examination.ours, result.examination.theirs, result.examination.truth
    low = result.precision != "fp64"
    return PageCase(
        name=result.case.name,
        precision=result.precision,
        optimizer=result.case.optimizer.name,
        dropout=result.dropout,
        **asdict(settings),
        passed=verdict.passed,
        faults=(*verdict.faults, *filter(None, [verdict.stage, verdict.unlocated, verdict.diagnosis])),
        error_ratio=verdict.error_ratio,
        loss_rel=verdict.loss_rel,
        grad_rel_max=verdict.grad_rel_max,
        grad_worst=verdict.grad_worst,
        param_rel_max=verdict.param_rel_max,
        torch_losses=theirs.losses,
        jax_losses=ours.losses,
        torch_scales=theirs.scales,
        jax_scales=ours.scales,
        grad_errors=relative(ours.grads, truth.grads),
        torch_grad_errors=relative(theirs.grads, truth.grads) if low else None,
        floor=FLOORS[result.precision],
        difference=_difference(verdict.first_divergence),
        trajectory=verdict.trajectory,
    )


FLOORS = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
    "bf16_compute": 2.0**-7,
    "bf16_params": 2.0**-7,
}
"""The distance from 1 to the next number of each precision's matrix products."""


def _difference(found: Divergence | None) -> Difference | None:
    if found is None:
        return None
    module, _, op = found.torch.rpartition(": ")
    return Difference(module, op, excerpt(found.torch_at), excerpt(found.jax_at))


def excerpt(at: Line | None) -> Excerpt | None:
    """Return the lines around a line; none if the file is not available."""
    if at is None:
        return None
    file, number = at
    first, lines = max(number - 3, 1), linecache.getlines(file)
    return Excerpt(import_path(file), number, first, tuple(line.rstrip("\n") for line in lines[first - 1 : number + 2]))


def write_page(path: Path, environment: Mapping[str, Any], cases: Sequence[PageCase]) -> None:
    """Write a self-contained page of the cases, those that differ first."""
    jinja = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["number"] = _number
    template = jinja.from_string(resources.files("parity.report").joinpath("page.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        verdict=_verdict(cases),
        held=bool(cases) and all(case.passed for case in cases),
        bars=bars(),
        checks=[_check(i, case) for i, case in enumerate(sorted(cases, key=lambda case: case.passed), start=1)],
        levels=LEVELS,
        environment={k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in environment.items()},
    )
    partial = path.with_suffix(".partial")
    # A name may not be valid Unicode: a file name may contain a lone surrogate.
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(path)


@dataclass(frozen=True)
class _Axis:
    """An axis: `place` maps a value to its height, 0 to 1; `ticks` are heights with labels."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


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


def _verdict(cases: Sequence[PageCase]) -> str:
    """The verdict of all cases in one line.

    >>> _verdict([])
    'Nothing was checked'
    """
    if not cases:
        return "Nothing was checked"
    held = sum(case.passed for case in cases)
    differ = len(cases) - held
    return f"{held} check{'s' * (held != 1)} held, {differ or 'none'} differ{'s' * (differ < 2)}"


def _check(number: int, case: PageCase) -> dict[str, Any]:
    scales = [*case.torch_scales, *case.jax_scales]
    return {
        "anchor": f"check-{number}",
        "case": case,
        "losses": _losses(case) if len(case.torch_losses) or len(case.jax_losses) else None,
        "gradients": _gradients(case) if case.grad_errors else None,
        "legend": _legend(case),
        "worst": sorted(case.grad_errors, key=lambda name: _badness(case.grad_errors[name]), reverse=True)[:5],
        "scales": _scales(case) if len(set(scales)) > 1 else None,
    }


def _losses(case: PageCase) -> _Figure:
    theirs, ours, course = _floats(case.torch_losses), _floats(case.jax_losses), case.trajectory
    apart = [abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(ours, theirs, strict=False)]
    one_ulp: list[float] = []
    if course is not None:
        apart, one_ulp = _floats(course.apart), _floats(course.one_ulp)
    loss, difference = _linear([*theirs, *ours]), _logarithmic([*apart, *one_ulp, case.floor])
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
            f"step {i}: PyTorch {_loss(b)}, JAX {_loss(a)}, difference {_number(d)}"
            + (f", one ulp's {_number(one_ulp[i - 1])}" if one_ulp else "")
            for i, (a, b, d) in enumerate(zip(ours, theirs, apart, strict=False), start=1)
        ),
        ticks=[(i - 1, str(i)) for i in _whole(1, steps)],
        label="step",
        key=[
            ("torch", "PyTorch"),
            ("jax", "JAX"),
            *([("apart", "JAX's difference"), ("ulp", "PyTorch's, from weights one ulp off")] if one_ulp else []),
        ],
        notes=_gaps("loss", theirs, ours, first=1),
    )


def _scales(case: PageCase) -> _Figure:
    theirs, ours = _floats(case.torch_scales), _floats(case.jax_scales)
    axis, moments = _logarithmic([*theirs, *ours], base=2), max(len(theirs), len(ours))
    return _Figure(
        title="Loss scale",
        count=moments,
        panels=[_Panel("scale", axis.ticks, _both(theirs, ours, axis.place, moments, stepped=True))],
        stops=_stops(
            f"{f'after step {i}' if i else 'at the start'}: PyTorch {b:g}, JAX {a:g}"
            for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
        ),
        ticks=[(i, str(i)) for i in _whole(0, moments - 1)],
        label="after step",
        key=[("torch", "PyTorch"), ("jax", "JAX")],
        notes=_gaps("loss scale", theirs, ours, first=0),
    )


def _gradients(case: PageCase) -> _Figure:
    names, theirs = list(case.grad_errors), case.torch_grad_errors
    errors = {"JAX": [float(case.grad_errors[name]) for name in names]}
    if theirs is not None:
        errors = {"PyTorch": [float(theirs.get(name, math.nan)) for name in names], **errors}
    axis = _logarithmic([*(e for row in errors.values() for e in row), case.floor])
    curves = [
        ({"JAX": "dots jax", "PyTorch": "dots torch"}[side], _path(row, axis.place, len(names), joined=False))
        for side, row in errors.items()
    ]
    return _Figure(
        title="First gradient, by parameter",
        count=len(names),
        panels=[_Panel("relative error", axis.ticks, curves, _floor(case, axis))],
        stops=[
            (i, 1, ", ".join([name, *(f"{side} {_number(row[i])}" for side, row in errors.items())]))
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
        strips={side: [_level(e, case.floor) for e in row] for side, row in errors.items()},
        names=names if len(names) <= NAMED else (),
    )


def _range(floor: float) -> tuple[float, float]:
    """The decades that the colors span, the same for all checks of a precision, so that they are comparable."""
    low = math.log10(floor) - 1
    return low, max(0.0, low + 2)


def _level(error: float, floor: float) -> str:
    """CSS class of the color of an error."""
    if not math.isfinite(error):
        return "lost"
    low, high = _range(floor)
    share = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
    return f"t{min(max(int(share * LEVELS), 0), LEVELS - 1)}"


def _legend(case: PageCase) -> dict[str, Any]:
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


def _linear(values: Iterable[float]) -> _Axis:
    drawn = _drawn(values) or [0.0]
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(min(drawn), max(drawn))
    low, step = ticks[0], ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))

    def place(value: float) -> float:
        return float((_clipped(value) - low) / (ticks[-1] - low))

    wide = max(-low, ticks[-1]) >= 1e5
    return _Axis(place, [(place(t), f"{t:.2g}" if wide else f"{t:.{decimals}f}") for t in ticks])


def _logarithmic(values: Iterable[float], base: int = 10) -> _Axis:
    """Integer powers at both ends, and a separate place below them for zero, if there is one."""
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
    return _Axis(place, ticks if bottom == low else [(0.0, "0"), *ticks])


def _drawn(values: Iterable[float]) -> list[float]:
    return [_clipped(v) for v in values if math.isfinite(v)]


def _clipped(value: float) -> float:
    return min(max(value, -HUGE), HUGE)


def _floor(case: PageCase, axis: _Axis) -> tuple[float, str]:
    return axis.place(case.floor), f"{case.precision} rounding {_number(case.floor)}"


def _stops(texts: Iterable[str]) -> list[tuple[int, int, str]]:
    lines = list(texts)
    stride = -(-len(lines) // STOPS)
    return [(i, min(stride, len(lines) - i), lines[i]) for i in range(0, len(lines), stride or 1)]


def _whole(first: int, last: int) -> list[int]:
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


def _badness(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def _loss(value: float) -> str:
    return f"{value:.6g}"


def _number(value: float | None) -> str:
    """A distance in the format of the terminal's table; empty if there is none."""
    return "" if value is None else f"{value:.1e}" if math.isfinite(value) else "not finite"
