"""A page of all figures: a row for each engine, with a bar; shorter is faster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmarks.rows import NAMES, ratio_line, settings
from jaxtrain.folder_files import write_file
from jaxtrain.pages import Table, render_page

_COLORS = {"jax": "var(--c0)", "optax": "var(--c5)", "torch_eager": "var(--c7)", "torch_compile": "var(--c1)"}
_HEADING = (
    *("workload", "engine", "precision", "lower decile", "median", "minimum", "CPU seconds", "per second"),
    *("MFU", "memory", "compile", "warm compile"),
)


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write a self-contained HTML page with bars and all figures."""
    longest: dict[str, float] = {}
    for row in document["rows"]:
        longest[_group(row)] = max(row["lower_decile_s"], longest.get(_group(row), 0.0))
    page = render_page(
        "benchmarks",
        "page.html.j2",
        title=f"JAX and PyTorch: {document['suite']}",
        table=Table(
            _HEADING,
            [_cells(row, row["lower_decile_s"] / longest[_group(row)]) for row in document["rows"]],
            "figures",
            numbers=range(4, 12),
        ),
        lines=[ratio_line(ratio) for ratio in document["ratios"] if not ratio["feature"] and not ratio["sizes"]],
        names=NAMES,
        **{name: document[name] for name in ("complete", "notes", "ceilings", "environment")},
    )
    write_file(path, page)


def _group(row: Mapping[str, Any]) -> str:
    """Rows whose bars have one scale."""
    return f"{row['workload']} {row['precision']} {'' if row['feature'] or row['sizes'] else settings(row)}"


def _cells(row: Mapping[str, Any], share: float) -> tuple[object, ...]:
    """The cells of a row; its bar is as long as its share of the slowest engine's time."""
    bar = Markup('<span class="meter" style="--share: {:.1%}; --fill: {}"></span>{:.3g} ms (to {:.3g})')
    return (
        f"{row['workload']} {settings(row)}",
        NAMES[row["engine"]],
        row["precision"],
        bar.format(share, Markup(_COLORS[row["engine"]]), row["lower_decile_s"] * 1e3, row["upper_decile_s"] * 1e3),
        f"{row['median_s'] * 1e3:.2f} ms",
        f"{row['min_s'] * 1e3:.2f} ms",
        f"{row['cpu_s']:.3f}",
        f"{row['per_s']:,.0f} {row['unit']}",
        "" if row["mfu"] is None else f"{row['mfu']:.0%}",
        f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        "" if row["compile_s"] is None else f"{row['compile_s']:.1f} s",
        "" if row["warm_compile_s"] is None else f"{row['warm_compile_s']:.1f} s",
    )
