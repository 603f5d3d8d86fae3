"""Bar chart as PNG: a panel for each workload and precision, a bar for each engine; shorter is faster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.rows import NAMES, settings

matplotlib.use("Agg")
from matplotlib.figure import Figure

COLORS = {"jax": "#2a78d6", "optax": "#7fb0e6", "torch_eager": "#b8b8b8", "torch_compile": "#7d7d7d"}


def write_picture(path: Path, document: Mapping[str, Any]) -> None:
    """Write the chart as PNG."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        title = f"{row['workload']} · {row['precision']}"
        if not (row["feature"] or row["sizes"]):
            title = f"{title} {settings(row)}".strip()
        panels.setdefault(title, []).append(row)
    figure = Figure(figsize=(8, sum(0.7 + 0.32 * len(rows) for rows in panels.values())), layout="constrained")
    heights = [1.2 + len(rows) for rows in panels.values()]
    grid = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for (title, rows), (axes,) in zip(panels.items(), grid, strict=True):
        _draw_bars(axes, title, rows)
    figure.savefig(path, format="png", dpi=150)


def _draw_bars(axes: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    milliseconds = [row["lower_decile_s"] * 1e3 for row in rows]
    upper_deciles = [row["upper_decile_s"] * 1e3 for row in rows]
    positions = range(len(rows))[::-1]
    axes.barh(positions, milliseconds, color=[COLORS[row["engine"]] for row in rows])
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_yticks(positions, [_bar_label(row) for row in rows], fontsize=8)
    for y, ms, upper in zip(positions, milliseconds, upper_deciles, strict=True):
        text = f"{ms:.3g} ms  (to {upper:.3g})"
        axes.annotate(text, (ms, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, max(milliseconds) * 1.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)


def _bar_label(row: Mapping[str, Any]) -> str:
    """Return the engine's name; settings too, unless they are in the panel's title."""
    label = settings(row) if row["feature"] or row["sizes"] else ""
    return f"{NAMES[row['engine']]} {label}".strip()
