"""Choose the charts of a report, and thin their curves to what a screen can show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from jaxtrain.observe.formatting import metric_label
from jaxtrain.observe.log_line import LOSS_SCALES, SHARE
from jaxtrain.observe.run_record import Record

_POINTS = 1500  # points per curve: about the columns of a wide screen
_LAYERS = 8  # curves that a reader can tell apart in one chart
# Keys of metrics.jsonl that are drawn as marks instead of curves.
_MARKS = {"step", "skipped", "rolled_back_from", "rolled_back_to", "spike_loss", "batches_skipped"}


@dataclass(frozen=True)
class Curve:
    """One metric in a chart."""

    metric: str
    label: str
    dotted: bool = False
    """Whether points are marked, for metrics with few of them."""
    stepped: bool = False
    """Whether a value is constant until the next one."""
    smooth: bool = False
    """Whether the curve is noisy, so that the reader may smooth it."""


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    """Format of values: "nats", "s", "%" (of 1), "B" (bytes), "×" (a power of 2); "" for a plain number."""
    log: bool = False
    zero: bool = False
    """Whether a linear axis begins at 0."""
    wide: bool = False
    references: Mapping[str, float] = field(default_factory=dict)
    skips: bool = False
    """Whether skipped updates are marked."""


_Point = tuple[Any, ...]  # (step, value), the value None if it is not finite
_LOSS = Curve("loss", "training", smooth=True)
_VALIDATION = Curve("eval_loss", "validation", dotted=True)
_KNOWN = (
    Chart("gradient norm", (Curve("grad_norm", "gradient norm", smooth=True),)),
    Chart("loss scale", (Curve("loss_scale", "loss scale", stepped=True),), unit="×", log=True, skips=True),
    Chart("tokens per second", (Curve("tokens_per_s", "tokens per second", smooth=True),), zero=True),
    Chart("examples per second", (Curve("examples_per_s", "examples per second", smooth=True),), zero=True),
    Chart(
        "step time",
        (
            Curve("step_time_s", "step time", smooth=True),
            Curve("input_wait_s", "waiting for input", smooth=True),
        ),
        unit="s",
        zero=True,
    ),
    Chart("model FLOPs utilization", (Curve("mfu", "MFU", smooth=True),), unit="%", zero=True),
    Chart("GPU utilization", (Curve("gpu_utilisation", "GPU busy", smooth=True),), unit="%", zero=True),
    Chart("peak memory", (Curve("peak_memory_bytes", "peak memory", stepped=True),), unit="B", zero=True),
)


def charts(records: Sequence[Record]) -> list[Chart]:
    """Return the charts of what these runs logged: the loss first, and one chart for each unknown metric."""
    names = dict.fromkeys(
        name for record in records for line in record.metrics for name in line.values() if name not in _MARKS
    )
    names = {name: None for name in names if not name.startswith(SHARE)}
    if not any(record.uses_loss_scale for record in records):
        names.pop("loss_scale", None)
    found = [*_losses(records)]
    for name in [name for name in names if name.startswith("eval_") and name != "eval_loss"]:
        label = metric_label(name.removeprefix("eval_"))
        found.append(Chart(f"validation {label}", (Curve(name, label, dotted=True),)))
    # With parameter groups each rate is logged as "lr/NAME", and "lr" repeats the first.
    rates = [name for name in names if name.startswith("lr/")] or [name for name in names if name == "lr"]
    if rates:
        found.append(Chart("learning rate", tuple(Curve(name, name.replace("lr/", "group ")) for name in rates)))
    found += [chart for chart in _known(len(records)) if any(curve.metric in names for curve in chart.curves)]
    found += _scales_of_layers([name for name in names if name.startswith(LOSS_SCALES)], len(records))
    drawn = (
        {name for name in names if name.startswith(LOSS_SCALES)}
        | {curve.metric for chart in found for curve in chart.curves}
        | {"lr"}
    )
    return [*found, *(Chart(name, (Curve(name, name, smooth=True),)) for name in names if name not in drawn)]


def _scales_of_layers(names: Sequence[str], runs: int) -> list[Chart]:
    """The loss scales of layers, evenly chosen if there are many; with several runs one chart per layer."""
    positions = np.linspace(0, len(names) - 1, _LAYERS).round().astype(int)
    chosen = [names[i] for i in sorted({*positions})] if names else []
    curves = [Curve(name, name.replace(LOSS_SCALES, "layer "), stepped=True) for name in chosen]
    if runs > 1:
        return [Chart(f"loss scale, {curve.label}", (curve,), unit="×", log=True) for curve in curves]
    return [Chart("loss scales of layers", tuple(curves), unit="×", log=True, skips=True)] if curves else []


def _known(runs: int) -> list[Chart]:
    """The charts of known metrics; with several runs one chart per curve, to keep charts readable."""
    if runs == 1:
        return list(_KNOWN)
    alone = [(chart, curve) for chart in _KNOWN for curve in chart.curves]
    return [
        replace(chart, title=curve.label if len(chart.curves) > 1 else chart.title, curves=(curve,))
        for chart, curve in alone
    ]


def _losses(records: Sequence[Record]) -> list[Chart]:
    references = {name: value for record in records for name, value in record.references.items()}
    if len(records) == 1:
        return [Chart("loss", (_LOSS, _VALIDATION), unit="nats", wide=True, references=references)]
    return [
        Chart("validation loss", (_VALIDATION,), unit="nats", wide=True, references=references),
        Chart("training loss", (_LOSS,), unit="nats", wide=True),
    ]


def chart_data(records: Sequence[Record]) -> dict[str, Any]:
    """Return the charts and their points as JSON, for report.js."""
    chosen = charts(records)
    curves = {curve.metric: curve for chart in chosen for curve in chart.curves}
    return {"charts": [asdict(chart) for chart in chosen], "runs": [_run(record, curves) for record in records]}


def _run(record: Record, curves: Mapping[str, Curve]) -> dict[str, Any]:
    lines = [line.to_json() for line in record.metrics]
    series = {}
    for name, curve in curves.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points and (record.uses_loss_scale or name != "loss_scale"):
            series[name] = average_points(points) if curve.smooth else _columns(thin_points(points))
    return {
        "name": record.name,
        "unit": record.unit,
        "clock": [_short(column) for column in zip(*thin_points(record.clock), strict=True)],
        "series": series,
        "skips": _merged([(line.step, line.skipped) for line in record.metrics if line.skipped]),
        "rollbacks": [[line.rollback.from_step, line.rollback.to_step] for line in record.metrics if line.rollback],
    }


def average_points(points: Sequence[_Point], most: int = _POINTS) -> dict[str, list[float | None]]:
    """Return `steps` and `values`; of more than `most` points the mean, `low` and `high` of each of `most` segments.

    `low` and `high` show the spikes that a mean hides, and smoothing means equals smoothing all points.

    >>> average_points([(0, 1.0), (1, 3.0), (2, None), (3, 2.0)], most=2)
    {'steps': [1, 3], 'values': [2.0, 2.0], 'low': [1.0, 2.0], 'high': [3.0, 2.0]}
    """
    if len(points) <= most:
        return _columns(points)
    segments = [
        (part[-1][0], [value for _, value in part if value is not None])
        for part in (points[a:b] for a, b in pairwise(np.linspace(0, len(points), most + 1).astype(int)))
    ]
    found: dict[str, list[float | None]] = {"steps": [step for step, _ in segments]}
    for name, reduce in (("values", _mean), ("low", min), ("high", max)):
        found[name] = _short([reduce(values) if values else None for _, values in segments])
    return found


def thin_points(points: Sequence[_Point], most: int = _POINTS) -> list[_Point]:
    """Return about `most` of the points: the lowest and the highest of every segment, and both ends.

    >>> thin_points([(step, 9.0 if step == 5 else 1.0) for step in range(12)], most=4)
    [(0, 1.0), (5, 9.0), (6, 1.0), (11, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    selected = {0, len(points) - 1}
    for segment in np.array_split(np.arange(len(points)), max(most // 2, 1)):
        known = [int(i) for i in segment if points[i][1] is not None]
        if known:
            selected |= {min(known, key=lambda i: points[i][1]), max(known, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(selected)]


def _columns(points: Sequence[_Point]) -> dict[str, list[float | None]]:
    steps, values = zip(*points, strict=True)
    return {"steps": list(steps), "values": _short(values)}


def _merged(skips: list[tuple[int, int]]) -> list[list[int]]:
    """(step, updates skipped up to it), merged to as many marks as a chart has room for."""
    if not skips:
        return []
    groups = np.array_split(np.array(skips), min(len(skips), _POINTS // 10))
    return [[int(group[-1, 0]), int(group[:, 1].sum())] for group in groups]


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Round to six digits, more than a screen shows."""
    return [float(f"{value:.6g}") if value is not None and np.isfinite(value) else None for value in values]


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # a sum of large values would overflow
