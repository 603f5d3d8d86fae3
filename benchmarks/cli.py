"""`python -m benchmarks [SUITE] [--json F]`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import SUITES, WORKLOADS
from jaxtrain.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a suite; 0, or 1 where the engines turn out to do different work, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="?", default="cpu", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    asked = parser.parse_args(argv)
    try:
        if asked.suite not in SUITES:
            raise UserError(f"no suite {asked.suite!r}: choose one of {', '.join(SUITES)}")
        if asked.json and not asked.json.absolute().parent.is_dir():
            raise UserError(f"{asked.json} has no folder to be written to: make {asked.json.parent}")
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return _run(asked.suite, asked.json)


def _run(suite: str, json_path: Path | None) -> int:
    from benchmarks.suite import measure
    from parity.report.document import environment

    console = Console(highlight=False)
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for name in SUITES[suite]:
        console.print(f"{name}: comparing the work in float64, compiling, timing …")
        outcome = measure(name, WORKLOADS[name])
        if outcome is None:
            console.print(f"{name}: the engines do not do the same work: parity run says where")
            return 1
        rows += outcome.rows
        ratios.append(outcome.ratio)
    console.print(_table(rows, ratios))
    if json_path:
        document = {"environment": environment(), "rows": rows, "ratios": ratios}
        json_path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    return 0


def _table(rows: list[dict[str, Any]], ratios: list[dict[str, Any]]) -> Table:
    table = Table("workload", "engine", "lower decile", "median", "per second", "FLOP/s", "JAX against eager")
    speedups = {r["workload"]: r["jax_vs_eager"] for r in ratios}
    for row in rows:
        speedup = f"{speedups[row['workload']]:.2f}×" if row["engine"] == "jax" else ""
        table.add_row(
            row["workload"],
            row["engine"],
            f"{row['lower_decile_s'] * 1e3:.2f} ms",
            f"{row['median_s'] * 1e3:.2f} ms",
            f"{row['per_s']:,.0f} {row['unit']}",
            f"{row['flops'] / row['lower_decile_s'] / 1e9:.1f} G",
            speedup,
        )
    return table
