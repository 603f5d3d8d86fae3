"""`python -m benchmarks [SUITE] [--workload W] [--precision P] [--minutes M] [--json F] [--html F] [--png F]`."""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import jaxtrain
from benchmarks.budget import Budget
from jaxtrain.errors import UserError

MINUTES = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a suite.

    Args:
      argv: Arguments; None takes those of the process.

    Returns:
      The exit status: 0, 1 where an engine fails or engines do different work, 2 for wrong usage, 130 if interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from benchmarks.suites import SUITES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time training steps of JAX and PyTorch on the same work.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"benchmarks of jaxtrain {jaxtrain.__version__}")
    parser.add_argument("suite", nargs="?", default="cpu", help=f"one of {', '.join(SUITES)} (default: cpu)")
    for flag in ("workload", "precision"):
        text = f"measure only rows of this {flag}; may be repeated"
        parser.add_argument(f"--{flag}", action="append", default=[], metavar=flag[0].upper(), help=text)
    text = f"time limit; what does not fit is reduced or skipped (default: {MINUTES:g})"
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="M", help=text)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures, updated after every workload")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page with bars and figures")
    parser.add_argument("--png", type=Path, metavar="F", help="write the chart")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from benchmarks.suites import select

    suite = select(arguments.suite, arguments.workload, arguments.precision)
    if not 0 < arguments.minutes < math.inf:
        raise UserError(f"--minutes must be positive and finite, got {arguments.minutes:g}")
    for path in (arguments.json, arguments.html, arguments.png):
        _check_writable(path)
    # Workers share the accelerator with this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from benchmarks.measure import Results, measure
    from parity.attestation import environment

    # A pipe has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    header: dict[str, Any] = {"suite": arguments.suite, "environment": environment()}
    document: dict[str, Any] = {}

    def save(results: Results, complete: bool = False) -> None:
        document.update({**header, **_figures(arguments.suite, results), "complete": complete})
        if arguments.json:
            write_json(arguments.json, document)

    budget = Budget(60 * arguments.minutes)
    try:
        with console.status("starting") as status:
            progress = status.update if console.is_terminal else console.print
            results = measure(suite, budget, progress, console.print, save)
        if arguments.suite == "scaling":
            from benchmarks.devices import memory_by_devices

            header["memory_per_device"] = memory_by_devices(budget.remaining())
        save(results, complete=True)
    finally:
        if document.get("rows"):
            _print(console, document)
            _write_pages(arguments.html, arguments.png, document)
    return 0


def _check_writable(path: Path | None) -> None:
    if path and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: create the folder {path.parent} or choose a writable one")


def _figures(suite: str, results: Any) -> dict[str, Any]:
    from benchmarks.figures import ceiling_rows, exponents, ratios, rows

    return {
        "ceilings": ceiling_rows(results.ceilings),
        "rows": rows(results.timings, results.ceilings),
        "ratios": ratios(results.timings),
        "exponents": exponents(results.timings) if suite == "scaling" else [],
        "notes": results.notes,
    }


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, so that an interruption leaves the previous one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _print(console: Console, document: Mapping[str, Any]) -> None:
    from benchmarks.figures import slope
    from benchmarks.rows import ratio_line, table

    console.print(table(document["rows"]))
    for ratio in document["ratios"]:
        console.print(ratio_line(ratio))
    for fit in document["exponents"]:
        console.print(f"{fit['engine']}: seconds ~ {fit['size']}^{fit['exponent']:.2f}")
    memory = document.get("memory_per_device", [])
    for kind in ("state", "temporaries") if memory else ():
        exponent = slope([(row["devices"], row[kind]) for row in memory])
        console.print(f"{kind} per device: bytes ~ devices^{exponent:.3f}")


def _write_pages(html: Path | None, png: Path | None, document: Mapping[str, Any]) -> None:
    if html:
        from benchmarks.page import write_page

        write_page(html, document)
    if png:
        from benchmarks.picture import write_picture  # imports matplotlib

        write_picture(png, document)
