"""Rows and ratios formatted for people: the table, the summary lines and the labels."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.job import Job

NAMES = {"jax": "JAX", "optax": "optax", "torch_eager": "PyTorch eager", "torch_compile": "PyTorch compiled"}
"""Engines as displayed."""


def settings(row: Mapping[str, Any]) -> str:
    """Format the settings that distinguish a row from the plain one of its workload.

    Example:
      >>> settings({"accumulate": 4, "remat": "full", "feature": "", "sizes": {"rows": 8}})
      'k=4 remat=full rows=8'
    """
    parts = [f"k={row['accumulate']}"] if row["accumulate"] > 1 else []
    parts += [f"remat={row['remat']}"] if row["remat"] != "none" else []
    parts += [row["feature"]] if row["feature"] else []
    return " ".join([*parts, *(f"{name}={value}" for name, value in row["sizes"].items())])


def job_label(job: Job) -> str:
    """Format a job for a message.

    Example:
      >>> job_label(Job("gpt2-tiny", "torch_eager", "bf16", remat="full"))
      'gpt2-tiny by torch_eager in bf16 remat=full'
    """
    return f"{job.workload} by {job.engine} in {job.precision} {settings(asdict(job))}".strip()


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Format rows as a table for the terminal."""
    columns = Table(
        *("workload", "engine", "precision", "settings", "lower decile", "median", "per second", "MFU", "memory"),
        *("predicted", "compile, warm"),
    )
    for row in rows:
        columns.add_row(
            row["workload"],
            row["engine"],
            row["precision"],
            settings(row),
            f"{row['lower_decile_s'] * 1e3:.2f} ms",
            f"{row['median_s'] * 1e3:.2f} ms",
            f"{row['per_s']:,.0f} {row['unit']}",
            "" if row["mfu"] is None else f"{row['mfu']:.0%}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            "" if row.get("predicted_s") is None else f"{row['predicted_s'] * 1e3:.2f} ms",
            "" if row["compile_s"] is None else f"{row['compile_s']:.1f} s, {row['warm_compile_s']:.1f} s",
        )
    return columns


def ratio_line(ratio: Mapping[str, Any]) -> str:
    """Format a ratio as a sentence.

    Example:
      >>> plain = {"accumulate": 1, "remat": "none", "feature": "", "sizes": {}, "jax_vs_compile": None}
      >>> measured = {"jax_vs_eager": 1.5, "intervals": {"torch_eager": (1.4, 1.6)}}
      >>> ratio_line({"workload": "vit-s", "precision": "bf16", **measured, **plain})
      'vit-s bf16: JAX is 1.50× (1.40 to 1.60) as fast as eager PyTorch'
    """
    names = {"eager": "eager PyTorch", "compile": "compiled PyTorch"}
    speeds = [
        f"{ratio[f'jax_vs_{key}']:.2f}×{_interval(ratio, f'torch_{key}')} as fast as {name}"
        for key, name in names.items()
        if ratio[f"jax_vs_{key}"] is not None
    ]
    work = f"{ratio['workload']} {ratio['precision']} {settings(ratio)}".strip()
    return f"{work}: JAX is {' and '.join(speeds)}"


def _interval(ratio: Mapping[str, Any], engine: str) -> str:
    found = ratio.get("intervals", {}).get(engine)
    return "" if found is None else f" ({found[0]:.2f} to {found[1]:.2f})"
