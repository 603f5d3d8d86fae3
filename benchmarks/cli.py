"""`python -m benchmarks [SUITE] [--json F] [--html F] [--png F]`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a suite; 0, or 1 where an engine fails or does other work, or 2 for wrong usage."""
    from benchmarks.suites import SUITES

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="JAX beside PyTorch on the same work")
    parser.add_argument("suite", nargs="?", default="cpu", help=f"one of {', '.join(SUITES)}")
    for kind, what in {"json": "the figures", "html": "a page to look at", "png": "its picture alone"}.items():
        parser.add_argument(f"--{kind}", type=Path, metavar="F", help=f"where to write {what}")
    asked = parser.parse_args(argv)
    try:
        if asked.suite not in SUITES:
            raise UserError(f"no suite {asked.suite!r}: choose one of {', '.join(SUITES)}")
        for path in (asked.json, asked.html, asked.png):
            _check_writable(path)
        return _run(asked.suite, asked.json, asked.html, asked.png)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_status


def _check_writable(path: Path | None) -> None:
    if path and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{path} has no folder to be written to: make {path.parent}")


def _run(name: str, json_path: Path | None, html_path: Path | None, png_path: Path | None) -> int:
    from benchmarks import devices
    from benchmarks.suites import SUITES, exponents, measured, ratios, rows, slope
    from parity.attestation import environment

    # A pipe has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    with console.status("starting") as status:
        timings, ceilings = measured(SUITES[name], status.update if console.is_terminal else console.print)
    document: dict[str, Any] = {
        "suite": name,
        "environment": environment(),
        "ceilings": [_ceiling(t) for t in ceilings],
        "rows": rows(timings, ceilings),
        "ratios": ratios(timings),
        "exponents": exponents(timings) if name == "scaling" else [],
    }
    if name == "scaling":
        document["memory_per_device"] = devices.memory()
    console.print(_table(document["rows"]))
    for ratio in document["ratios"]:
        console.print(_said(ratio))
    for fit in document["exponents"]:
        console.print(f"{fit['engine']}: seconds ~ {fit['size']}^{fit['exponent']:.2f}")
    for kind in ("state", "temporaries") if name == "scaling" else ():
        points = [(row["devices"], row[kind]) for row in document["memory_per_device"]]
        console.print(f"{kind} of one device: bytes ~ devices^{slope(points):.3f}")
    if json_path:
        json_path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    if html_path or png_path:
        from benchmarks.picture import write_page, write_picture  # matplotlib, which nothing else needs

        if html_path:
            write_page(html_path, document)
        if png_path:
            write_picture(png_path, document)
    return 0


def _ceiling(timing: Any) -> dict[str, Any]:
    from benchmarks.ceiling import COPIED

    seconds, product = float(timing.wall.min()), timing.flops is not None
    platform = "cpu" if timing.device == "cpu" else "gpu"
    return {
        "what": timing.job.workload,
        "engine": timing.job.engine,
        "precision": timing.job.precision,
        "per_s": timing.flops / seconds if product else 2 * COPIED[platform] / seconds,
        "unit": "FLOP" if product else "byte",
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "workload", "engine", "precision", "", "lower decile", "median", "per second", "MFU", "memory", "compile, warm"
    )
    for row in rows:
        table.add_row(
            row["workload"],
            row["engine"],
            row["precision"],
            settings(row),
            f"{row['lower_decile_s'] * 1e3:.2f} ms",
            f"{row['median_s'] * 1e3:.2f} ms",
            f"{row['per_s']:,.0f} {row['unit']}",
            "" if row["mfu"] is None else f"{row['mfu']:.0%}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            "" if row["compile_s"] is None else f"{row['compile_s']:.1f} s, {row['warm_compile_s']:.1f} s",
        )
    return table


def settings(row: dict[str, Any]) -> str:
    """What sets a row apart from the plain one of its workload.

    >>> settings({"accumulate": 4, "remat": "full", "feature": "", "sizes": {"rows": 8}})
    'k=4 remat=full rows=8'
    """
    said = [f"k={row['accumulate']}"] if row["accumulate"] > 1 else []
    said += [f"remat={row['remat']}"] if row["remat"] != "none" else []
    said += [row["feature"]] if row["feature"] else []
    return " ".join([*said, *(f"{name}={value}" for name, value in row["sizes"].items())])


def _said(ratio: dict[str, Any]) -> str:
    names = {"jax_vs_eager": "eager PyTorch", "jax_vs_compile": "compiled PyTorch"}
    found = [f"{ratio[key]:.2f}× {name}" for key, name in names.items() if ratio[key] is not None]
    return f"{ratio['workload']} {ratio['precision']} {settings(ratio)}: JAX is {' and '.join(found)}"
