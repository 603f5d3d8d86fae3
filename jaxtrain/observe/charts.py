"""The curves of a report: which charts there are, and the points of each, thinned to what a screen can show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from jaxtrain.observe.record import Record

_POINTS = 1500  # of a curve: about as many as a wide screen has columns
# Of a line of metrics.jsonl, what is no curve: it is drawn as a mark, or belongs to one.
_MARKS = {"step", "skipped", "rolled_back_from", "rolled_back_to", "spike_loss", "batches_skipped"}


@dataclass(frozen=True)
class Curve:
    """A metric in a chart."""

    metric: str
    label: str
    dotted: bool = False
    """Whether its points are marked: they are few."""
    stepped: bool = False
    """Whether a value holds until the next one."""
    smooth: bool = False
    """Whether it is noisy, so that smoothing it tells more."""


@dataclass(frozen=True)
class Chart:
    """Curves on the same axes."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    """How its values are told: "nats", "s", "%" of 1, "B"ytes, "×" of a factor by powers of 2; "" for a bare number."""
    log: bool = False
    zero: bool = False
    """Whether the axis begins at 0, unless it is logarithmic."""
    wide: bool = False
    references: Mapping[str, float] = field(default_factory=dict)
    skips: bool = False
    """Whether skipped updates are marked."""


_Point = tuple[Any, ...]  # the step, and what was there, None of what was not finite
_LOSS = Curve("loss", "training", smooth=True)
_VALIDATION = Curve("eval_loss", "validation", dotted=True)
_KNOWN = (
    Chart("gradient norm", (Curve("grad_norm", "gradient norm", smooth=True),)),
    Chart("loss scale", (Curve("loss_scale", "loss scale", stepped=True),), unit="×", log=True, skips=True),
    Chart("tokens a second", (Curve("tokens_per_s", "tokens a second", smooth=True),), zero=True),
    Chart("examples a second", (Curve("examples_per_s", "examples a second", smooth=True),), zero=True),
    Chart(
        "time of a step",
        (
            Curve("step_time_s", "time of a step", smooth=True),
            Curve("input_wait_s", "of it waiting for input", smooth=True),
        ),
        unit="s",
        zero=True,
    ),
    Chart("model FLOPs utilisation", (Curve("mfu", "MFU", smooth=True),), unit="%", zero=True),
    Chart("GPU utilisation", (Curve("gpu_utilisation", "GPU busy", smooth=True),), unit="%", zero=True),
    Chart("peak memory", (Curve("peak_memory_bytes", "peak memory", stepped=True),), unit="B", zero=True),
)


def charts(records: Sequence[Record]) -> list[Chart]:
    """The charts of what these runs logged: those of the loss first, and one for each metric that is not known here."""
    names = {name: None for record in records for line in record.metrics for name in line if name not in _MARKS}
    if not any(record.scaled for record in records):
        names.pop("loss_scale", None)
    found = [*_losses(records)]
    for name in [name for name in names if name.startswith("eval_") and name != "eval_loss"]:
        label = name.removeprefix("eval_").replace("_", " ")
        found.append(Chart(f"validation {label}", (Curve(name, label, dotted=True),)))
    # A rate for each parameter group is written "lr/0"; "lr" is then the first one's.
    rates = [name for name in names if name.startswith("lr/")] or [name for name in names if name == "lr"]
    if rates:
        found.append(Chart("learning rate", tuple(Curve(name, name.replace("lr/", "group ")) for name in rates)))
    found += [chart for chart in _known(len(records)) if any(curve.metric in names for curve in chart.curves)]
    drawn = {curve.metric for chart in found for curve in chart.curves} | {"lr"}
    return [*found, *(Chart(name, (Curve(name, name, smooth=True),)) for name in names if name not in drawn)]


def _known(runs: int) -> list[Chart]:
    """Of several runs each curve has a chart of its own: two curves a run would be a thicket."""
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
    """The charts and all their points, as JSON: what the page draws."""
    of_runs = charts(records)
    curves = {curve.metric: curve for chart in of_runs for curve in chart.curves}
    return {"charts": [asdict(chart) for chart in of_runs], "runs": [_run(record, curves) for record in records]}


def _run(record: Record, curves: Mapping[str, Curve]) -> dict[str, Any]:
    series = {}
    for name, curve in curves.items():
        points = [(line["step"], line[name]) for line in record.metrics if name in line]
        if points and (record.scaled or name != "loss_scale"):
            series[name] = average_points(points) if curve.smooth else _columns(thin_points(points))
    return {
        "name": record.name,
        "unit": record.unit,
        "clock": [_short(column) for column in zip(*thin_points(record.clock), strict=True)],
        "series": series,
        "skips": _merged([(line["step"], line["skipped"]) for line in record.metrics if line.get("skipped")]),
        "rollbacks": [
            [line["rolled_back_from"], line["rolled_back_to"]] for line in record.metrics if "rolled_back_from" in line
        ],
    }


def average_points(points: Sequence[_Point], most: int = _POINTS) -> dict[str, list[float | None]]:
    """`steps` and `values`; of more than `most` points the mean of each stretch, with its `low` and `high`.

    A mean hides no spike beside its highest, and smoothing it is smoothing all the points.

    >>> average_points([(0, 1.0), (1, 3.0), (2, None), (3, 2.0)], most=2)
    {'steps': [1, 3], 'values': [2.0, 2.0], 'low': [1.0, 2.0], 'high': [3.0, 2.0]}
    """
    if len(points) <= most:
        return _columns(points)
    stretches = [
        (part[-1][0], [value for _, value in part if value is not None])
        for part in (points[a:b] for a, b in pairwise(np.linspace(0, len(points), most + 1).astype(int)))
    ]
    found: dict[str, list[float | None]] = {"steps": [step for step, _ in stretches]}
    for name, of in (("values", fmean), ("low", min), ("high", max)):
        found[name] = _short([of(values) if values else None for _, values in stretches])
    return found


def thin_points(points: Sequence[_Point], most: int = _POINTS) -> list[_Point]:
    """At most about `most` of the points: of every stretch the lowest and the highest, and the ends.

    >>> thin_points([(step, 9.0 if step == 5 else 1.0) for step in range(12)], most=4)
    [(0, 1.0), (5, 9.0), (6, 1.0), (11, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in np.array_split(np.arange(len(points)), max(most // 2, 1)):
        known = [int(i) for i in stretch if points[i][1] is not None]
        if known:
            kept |= {min(known, key=lambda i: points[i][1]), max(known, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def _columns(points: Sequence[_Point]) -> dict[str, list[float | None]]:
    steps, values = zip(*points, strict=True)
    return {"steps": list(steps), "values": _short(values)}


def _merged(skips: list[tuple[int, int]]) -> list[list[int]]:
    """(step, updates skipped by then since the one before), as many as a chart has room for."""
    if not skips:
        return []
    groups = np.array_split(np.array(skips), min(len(skips), _POINTS // 10))
    return [[int(group[-1, 0]), int(group[:, 1].sum())] for group in groups]


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Six digits: more than a screen shows."""
    return [value if value is None else float(f"{value:.6g}") for value in values]
