"""The curve of a run as a notebook shows it."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxtrain.observe.charts import thin_points

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 56, 12, 28, 26
_POINTS = 400  # more than the pixels of a curve
_CURVES = (("loss", "training", "#2563eb"), ("eval_loss", "validation", "#c2570c"))


def curve_figure(history: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return an SVG of the training loss and the validation loss over the steps.

    Args:
      history: Lines of metrics.jsonl.
      title: Text above the curves.

    Example:
      >>> curve_figure([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "runs/mine").count("<polyline")
      1
    """
    curves = {name: _finite(history, name) for name, _, _ in _CURVES}
    values = [value for points in curves.values() for _, value in points]
    if not values:
        return f"<pre>{escape(title)}: no loss was logged</pre>"
    last_step = max(step for points in curves.values() for step, _ in points)
    low, high = min(values), max(values)
    span = high - low or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + step / max(last_step, 1) * (_WIDTH - _LEFT - _RIGHT)
        return round(x, 1), round(_TOP + (high - value) / span * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="loss of {escape(title)}" '
        'style="max-width: 100%; font: 12px system-ui, sans-serif">',
        *_grid(low, low + span, last_step, place),
    ]
    heading = _LEFT
    for name, label, color in _CURVES:
        if points := curves[name]:
            line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in thin_points(points, _POINTS)))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>')
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>' for x, y in [place(*points[-1])]]
            text = f"{label} loss {points[-1][1]:.4g}"
            parts.append(f'<text x="{heading}" y="14" fill="{color}">{text}</text>')
            heading += 8 * len(text) + 16
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="14" text-anchor="end" fill="gray">{escape(title)}</text></svg>')
    return "".join(parts)


def _finite(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    points = [(line["step"], line.get(name)) for line in history]
    return [(step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)]


def _grid(low: float, high: float, last_step: int, place: Any) -> list[str]:
    """Lines and labels at four losses, and the first and the last step."""
    parts = []
    for value in (low + (high - low) * i / 3 for i in range(4)):
        _, y = place(0, value)
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="gray" stroke-opacity=".3"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="gray">{value:.4g}</text>')
    below = _HEIGHT - 8
    parts.append(f'<text x="{_LEFT}" y="{below}" fill="gray">0</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{below}" text-anchor="end" fill="gray">step {last_step:,}</text>')
    return parts
