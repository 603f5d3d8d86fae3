"""`python -m benchmarks [SUITE] [--workload W] [--precision P] [--minutes M] [--json F] [--html F] [--png F]`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

import jaxtrain
from benchmarks.budget import Budget
from jaxtrain.errors import UserError
from jaxtrain.fields import Bound, field_errors
from jaxtrain.flags import Flag, check_writable, parse

if TYPE_CHECKING:
    from benchmarks.measure import Results


@dataclass(frozen=True)
class Benchmarks:
    """Time training steps of JAX and PyTorch on the same work."""

    suite: Annotated[str, Flag(positional=True, metavar="SUITE")] = "cpu"
    """cpu, gpu, optimizers, host, features or scaling; cpu by default."""
    workload: Annotated[tuple[str, ...], Flag(metavar="W", listed=True)] = ()
    """Measure only rows of these workloads, separated by commas; by default all."""
    precision: Annotated[tuple[str, ...], Flag(metavar="P", listed=True)] = ()
    """Measure only rows of these precisions, separated by commas; by default all."""
    minutes: Annotated[float, Bound(lambda x: x > 0, "be positive and finite"), Flag(metavar="M")] = 10.0
    """Time limit; what does not fit is reduced or skipped."""
    json: Annotated[Path | None, Flag(metavar="F")] = None
    """Write the figures, updated after every workload."""
    html: Annotated[Path | None, Flag(metavar="F")] = None
    """Write a page with bars and figures."""
    png: Annotated[Path | None, Flag(metavar="F")] = None
    """Write the chart."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a suite.

    Args:
      argv: Arguments; None takes those of the process.

    Returns:
      The exit status: 0, 1 where an engine fails or engines do different work, 2 for wrong usage, 130 if interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(f"benchmarks of jaxtrain {jaxtrain.__version__}")
        return 0
    try:
        return _run(parse(Benchmarks(), args, "python -m benchmarks"))
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 130


def check_gpu() -> None:
    """Raise `UserError` unless both frameworks run on a GPU."""
    import jax
    import torch

    remedy = "choose the suite cpu, or ask `jaxtrain doctor` what is missing"
    if jax.default_backend() != "gpu":
        raise UserError(f"suite gpu needs a GPU, but JAX runs on the {jax.default_backend()}: {remedy}")
    if not torch.cuda.is_available():
        raise UserError("suite gpu needs a PyTorch that uses the GPU, but this one does not: install its CUDA build")


def _run(options: Benchmarks) -> int:
    from benchmarks.suites import select

    suite = select(options.suite, options.workload, options.precision)
    if wrong := field_errors(options):
        raise UserError(f"--{wrong[0]}")
    for path in (options.json, options.html, options.png):
        check_writable(path)
    # Workers share the accelerator with this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.suite == "gpu":
        check_gpu()

    from benchmarks.measure import measure
    from parity.attestation import environment

    # A pipe has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    header: dict[str, Any] = {"suite": options.suite, "environment": environment()}
    document: dict[str, Any] = {}

    def save(results: "Results", complete: bool = False) -> None:
        document.update({**header, **figures_of(options.suite, results), "complete": complete})
        if options.json:
            write_json(options.json, document)

    budget = Budget(60 * options.minutes)
    try:
        with console.status("starting") as status:
            progress = status.update if console.is_terminal else console.print
            results = measure(suite, budget, progress, console.print, save)
        if options.suite == "scaling":
            from benchmarks.devices import memory_by_devices

            header["memory_per_device"] = memory_by_devices(budget.remaining())
        save(results, complete=True)
    finally:
        if document.get("rows"):
            print_figures(console, document)
            write_figures(document, html=options.html, png=options.png)
    return 0


def figures_of(suite: str, results: "Results") -> dict[str, Any]:
    """Return the figures of a document."""
    from benchmarks.figures import ceiling_rows, exponents, ratios, rows

    groups = [group for group in results.groups if group.timings]
    return {
        "ceilings": [row for g in groups for row in ceiling_rows(g.ceilings, g.timings[0].job.workload)],
        "rows": [row for group in groups for row in rows(*group)],
        "ratios": [row for group in groups for row in ratios(group.timings)],
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


def print_figures(console: Console, document: Mapping[str, Any]) -> None:
    """Print the table of a document, its ratios and what follows from them."""
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


def write_figures(
    document: Mapping[str, Any], *, json: Path | None = None, html: Path | None = None, png: Path | None = None
) -> None:
    """Write a document to those files that have a name."""
    if json:
        write_json(json, document)
    if html:
        from benchmarks.page import write_page

        write_page(html, document)
    if png:
        from benchmarks.picture import write_picture  # imports matplotlib

        write_picture(png, document)
