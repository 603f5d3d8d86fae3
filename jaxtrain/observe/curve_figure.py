"""The curve of a run as a notebook shows it."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxtrain.observe.charts import thin_points
from jaxtrain.pages import Chart, Panel, between, curve, linear, svg, whole

_WIDTH = 640
_POINTS = 400  # more than the pixels of a curve
_CURVES = (("loss", "training", "c0"), ("eval_loss", "validation", "c1"))


def curve_figure(history: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return an SVG of the training loss and the validation loss over the steps.

    Args:
      history: Lines of metrics.jsonl.
      title: Text above the curves.

    Example:
      >>> curve_figure([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "runs/mine").count("training loss 1")
      1
    """
    found = {name: points for name, _, _ in _CURVES if (points := _finite(history, name))}
    if not found:
        return f"<pre>{escape(title)}: no loss was logged</pre>"
    last = max(step for points in found.values() for step, _ in points)
    x = between(0, last, whole(0, last))
    y = linear(value for points in found.values() for _, value in points)
    drawn = [(name, label, css) for name, label, css in _CURVES if name in found]
    chart = Chart(
        title,
        x,
        [Panel("", y, [(css, curve(thin_points(found[name], _POINTS), x, y)) for name, _, css in drawn])],
        label="step",
        key=[(css, f"{label} loss {found[name][-1][1]:.4g}") for name, label, css in drawn],
    )
    return svg([chart], _WIDTH)


def _finite(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    points = [(line["step"], line.get(name)) for line in history]
    return [(step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)]
