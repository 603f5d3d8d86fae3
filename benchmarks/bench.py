"""One's own work in turns of JAX and PyTorch, as the workloads of the suites: `jaxtrain bench FILE.py::NAME`."""

import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import timing
from benchmarks.budget import Budget, OutOfTime
from benchmarks.cli import figures_of, print_figures, write_figures
from benchmarks.job import Job
from benchmarks.measure import Group, Results
from benchmarks.own_work import STEPS, Facts
from benchmarks.rows import job_label
from benchmarks.timing import Process, Report
from jaxtrain.errors import RunFailed, UserError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_compute")
"""Precisions that both frameworks have."""
FIRST_ROUNDS = 6
"""Rounds of the first figures: as many as an interval needs."""
ALL_ENGINES = 3.0
"""Least time of all engines, as a multiple of that in which JAX and eager PyTorch start and take a few turns."""
ENGINES = ("jax", "torch_eager", "torch_compile")
CONVENTION = (
    "MFU: FLOPs of the model's mathematics per second, without rematerialization, as a share of the fastest product of "
    "either framework in the same rounds."
)


def check(name: str, budget: Budget) -> Facts:
    """Return the facts, found by a process of its own.

    Raises:
      UserError: There is nothing of that name, or it has no side in PyTorch.
      RunFailed: The frameworks do different work, or the comparison failed or did not end.
    """
    with Process(name, "-m", "benchmarks.own_work", name) as process:
        try:
            answer = process.receive(budget.remaining())
        except OutOfTime:
            raise RunFailed(f"{name}: its comparison in float64 did not end in time: use --minutes") from None
    if "wrong" in answer:
        raise UserError(answer["wrong"])
    found = Facts(**answer)
    if found.difference:
        raise RunFailed(found.difference)
    return found


def measure(
    name: str,
    precision: str | None,
    budget: Budget,
    progress: Report,
    note: Report,
    save: Callable[[Facts, Results, bool], None],
) -> None:
    """Time one's own work: first JAX and eager PyTorch, then all engines until the budget ends.

    Args:
      name: `path/to/file.py::NAME`.
      precision: One of `PRECISIONS`; None for that of the run.
      budget: Time limit.
      progress: Called with what is done next.
      note: Called with a line for each skipped or reduced piece of work.
      save: Called with figures, the first and those that replace them, and whether they are the last.

    Raises:
      UserError: As `check`, or the precision has no side in PyTorch.
      RunFailed: As `check`, or an engine failed.
    """
    whole = budget.remaining()
    progress(f"{name}: comparing {STEPS} updates in float64")
    found = check(name, budget)
    chosen = precision or found.precision
    _check_precision(chosen)
    note(f"the same work: {STEPS} updates in float64 differ by at most {found.largest:.0e}")
    jobs = [Job(name, engine, chosen, found.accumulate) for engine in ENGINES]
    notes: list[str] = []

    def report(line: str) -> None:
        notes.append(line)
        note(line)

    progress("first figures: JAX and eager PyTorch")
    left = budget.remaining()
    first = Group(timing.time_jobs(jobs[:2], FIRST_ROUNDS, budget.share(2), report), [])
    if len(first.timings) < 2:
        raise RunFailed(f"{name}: nothing could be timed in this time: use --minutes")
    needed = ALL_ENGINES * (left - budget.remaining())
    if budget.remaining() < needed:
        total = (whole - budget.remaining() + needed) / 60
        report(f"for compiled PyTorch, MFU and more rounds use --minutes {math.ceil(total)}, or more")
        save(found, Results([first], notes), True)
        return
    save(found, Results([first], notes), False)
    save(found, Results([_all_engines(jobs, found, budget, progress, report)], notes), True)


def _all_engines(jobs: list[Job], found: Facts, budget: Budget, progress: Report, report: Report) -> Group:
    """Time all engines beside the largest product until the budget ends; without compiled PyTorch where that fails."""
    loop = [replace(jobs[0], feature="loop")] if found.has_loop else []
    with ExitStack() as stack:
        products = [Job("product", engine, jobs[0].product_precision) for engine in ENGINES[:2]]
        progress("all engines, beside the largest product")
        beside = timing.warm_up(products, stack, budget.share(3), report)
        try:
            timings = timing.time_jobs([*loop, *jobs], None, budget, report, beside)
        except RunFailed as error:
            if not str(error).startswith(job_label(jobs[-1])):
                raise
            report(f"left out: {error}")
            timings = timing.time_jobs([*loop, *jobs[:2]], None, budget, report, beside)
        return Group(timings, [taken for worker in beside if (taken := worker.take())])


def bench(
    name: str,
    precision: str | None,
    seconds: float,
    *,
    json: Path | None = None,
    html: Path | None = None,
    png: Path | None = None,
) -> None:
    """Time one's own work, print the figures and write them to those files that have a name.

    Args:
      name: `path/to/file.py::NAME`.
      precision: One of `PRECISIONS`; None for that of the run.
      seconds: Time limit.
      json: File of the figures.
      html: Page of the figures.
      png: Chart of the figures.

    Raises:
      UserError: As `measure`, or PyTorch is missing.
      RunFailed: As `measure`.
    """
    if not all(name.rpartition("::")):
        raise UserError(f"{name!r} names no work: write jaxtrain bench path/to/file.py::NAME")
    if precision is not None:
        _check_precision(precision)
    if find_spec("torch") is None:
        raise UserError("jaxtrain bench needs torch: pip install 'jaxtrain[parity]'")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the accelerator
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)

    def save(found: Facts, results: Results, complete: bool) -> None:
        figures = document(found, results, complete)
        print_figures(console, figures)
        write_figures(figures, json=json, html=html, png=png)

    measure(name, precision, Budget(seconds), console.print, console.print, save)
    console.print(CONVENTION)


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is not in both frameworks: choose from {', '.join(PRECISIONS)}")


def document(found: Facts, results: Results, complete: bool) -> dict[str, Any]:
    """Return the figures as a document of `python -m benchmarks`, under the name of the work."""
    from parity.attestation import environment

    figures = figures_of("own", results)
    for row in (*figures["rows"], *figures["ratios"]):
        row["workload"] = found.name
    notes = [*figures["notes"], *(f"not compared: {line}" for line in found.not_exercised), CONVENTION]
    proof = {"updates": STEPS, "largest_difference": found.largest}
    header = {"suite": found.name, "environment": environment(), "same_work": proof, "complete": complete}
    return {**figures, **header, "notes": notes}
