"""The figures as bars: a panel for each workload and precision, a bar for each engine, shorter is faster."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader

matplotlib.use("Agg")
from matplotlib.figure import Figure

COLOURS = {"jax": "#2a78d6", "optax": "#7fb0e6", "torch_eager": "#b8b8b8", "torch_compile": "#7d7d7d"}
NAMES = {"jax": "JAX", "optax": "optax", "torch_eager": "PyTorch eager", "torch_compile": "PyTorch compiled"}


def write_picture(path: Path, document: Mapping[str, Any]) -> None:
    """As PNG."""
    path.write_bytes(_png(document))


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """One file, picture included."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    picture = base64.b64encode(_png(document)).decode()
    path.write_text(templates.get_template("page.html.j2").render(document, picture=picture, names=NAMES))


def _png(document: Mapping[str, Any]) -> bytes:
    from benchmarks.cli import settings

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
        _bars(axes, title, rows, [settings(row) if row["feature"] or row["sizes"] else "" for row in rows])
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def _bars(axes: Any, title: str, rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    shown = [row["lower_decile_s"] * 1e3 for row in rows]
    slowest = [row["upper_decile_s"] * 1e3 for row in rows]
    places = range(len(rows))[::-1]
    axes.barh(places, shown, color=[COLOURS[row["engine"]] for row in rows])
    axes.set_title(title, loc="left", fontsize=10)
    names = [" ".join(filter(None, (NAMES[row["engine"]], label))) for row, label in zip(rows, labels, strict=True)]
    axes.set_yticks(places, names, fontsize=8)
    for place, ms, slow in zip(places, shown, slowest, strict=True):
        axes.annotate(f"{ms:.3g} ms  (to {slow:.3g})", (ms, place), (4, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    axes.set_xlim(0, max(shown) * 1.35)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)
