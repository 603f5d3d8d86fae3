"""One's own work, timed as the workloads of the suites are: `jaxtrain bench FILE.py::NAME`.

`python -m benchmarks.own NAME` checks in a process of its own that both frameworks do the same work.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from benchmarks import timing
from benchmarks.budget import Budget, OutOfTime
from benchmarks.cli import figures_of, print_figures, write_figures
from benchmarks.job import Job
from benchmarks.measure import Group, Results
from benchmarks.rows import job_label
from benchmarks.timing import Process, Report
from benchmarks.workloads import WORKLOADS, Workload
from jaxtrain.errors import RunFailed, UserError
from parity.case import Case

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16_compute")
"""Precisions that both frameworks have."""
STEPS = 3
"""Updates that must be the same: the second and third depend on gradients and updates before them."""
FIRST_ROUNDS = 6
"""Rounds of the first figures: as many as an interval needs."""
ENGINES = ("jax", "torch_eager", "torch_compile")
CONVENTION = (
    "MFU: FLOPs of the model's mathematics per second, without rematerialization, as a share of the fastest product of "
    "either framework in the same rounds."
)


@dataclass(frozen=True)
class Facts:
    """What is known of one's own work before it is timed.

    Attributes:
      name: Its name.
      difference: What differs between the frameworks; "" if they do the same work.
      precision: The precision of the run; "fp32" if it is no run.
      accumulate: Micro-batches of an update.
      has_loop: Whether its program has a loop over layers, which can be unrolled.
      largest: The largest relative difference of a loss, a gradient and a parameter in float64.
      not_exercised: Lines on what the comparison leaves out.
    """

    name: str
    difference: str
    precision: str
    accumulate: int
    has_loop: bool
    largest: float
    not_exercised: list[str] = field(default_factory=list)


def workload_of(name: str) -> Workload:
    """Return a workload of the suites by its name, or one's own, `path/to/file.py::NAME`."""
    return own_workload(name) if "::" in name else WORKLOADS[name]


@cache
def own_workload(name: str) -> Workload:
    """Return one's own work: a recipe, a module with an example, a case, or a run that `jaxtrain port` wrote.

    Args:
      name: `path/to/file.py::NAME`.

    Raises:
      UserError: There is nothing of that name, or it has no side in PyTorch.
    """
    from parity.weights import completed

    case, unit, per_row = _case(name)
    case, _ = completed(case)
    return Workload(lambda **_: case, {"rows": case.rows, "length": per_row}, unit, model="")


def _case(name: str) -> tuple[Case, str, int]:
    """Return a case, the name of what it computes on, and how many of it a row has."""
    from jaxtrain.user_file import import_file
    from parity.cases.own import is_recipe, own_case

    path, _, attribute = name.rpartition("::")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path!r}: name a recipe, a module or a case as path/to/file.py::NAME")
    module = import_file(Path(path))
    found: Any = getattr(module, attribute, None)
    if not is_recipe(found):
        return own_case(name), "examples", 1
    case = _ported(module, Path(path), attribute) if _is_ported(module) else own_case(name)
    task = found().task()
    return case, task.unit, task.units_per_row


def _is_ported(module: ModuleType) -> bool:
    """Return whether a file was written by `jaxtrain port`."""
    return hasattr(module, "SCRIPT") and hasattr(module, "ARGS") and hasattr(module, "port")


def _ported(module: Any, path: Path, name: str) -> Case:
    """Record the script of a ported run again, and return the case of both."""
    from jaxtrain.port.data import keep_loaders
    from jaxtrain.port.kept_files import kept_files
    from jaxtrain.port.ported import ported
    from jaxtrain.port.script import record
    from jaxtrain.port.understand import understood
    from parity.ported import ported_case

    with tempfile.TemporaryDirectory() as kept, kept_files(Path(kept)), contextlib.redirect_stdout(sys.stderr):
        recording = record(module.SCRIPT, module.ARGS, STEPS)
    keep_loaders(module.SCRIPT, module.ARGS, [found.loader for found in recording.loaders])
    return ported_case(ported(understood(recording)), path.parent, name)


def facts(name: str) -> Facts:
    """Compare the first updates of both frameworks in float64."""
    import jax

    from parity.compare.verdict import Verdict
    from parity.run import examine
    from parity.settings import settings_of

    case = own_workload(name).case({})
    steps = min(STEPS, case.settings.get("steps", STEPS))
    verdict: Verdict = examine(case, "fp64", steps=steps).verdict
    loss: Any = case.loss_fn
    arguments = [case.params_like, case.batch(0, case.rows), jax.random.key(0)]
    arguments += [] if case.state_like is None else [case.state_like]
    with jax.numpy_dtype_promotion("standard"):
        program = str(jax.make_jaxpr(loss)(*arguments))
    found = examine(case, "fp64", locate=True, steps=steps) if not verdict.passed else None
    return Facts(
        name=case.name,
        difference="" if found is None else _difference(case.name, found.verdict),
        precision=case.precision or "fp32",
        accumulate=settings_of(case).accumulate,
        has_loop="scan[" in program,
        largest=max(verdict.loss_rel, verdict.grad_rel_max, verdict.param_rel_max),
        not_exercised=[*case.not_exercised],
    )


def _difference(name: str, verdict: Any) -> str:
    """Return in one line which tensor differs, and where."""
    where = verdict.stage or verdict.diagnosis or verdict.unlocated
    tensor = f" (largest in the gradient of {verdict.grad_worst})" if verdict.grad_worst else ""
    reason = f"{verdict.faults[0]}{tensor}" + (f"; {where}" if where else "")
    return f"{name}: JAX and PyTorch do different work, so that times would mean nothing: {reason}"


def check(name: str, budget: Budget) -> Facts:
    """Return the facts, found by a process of its own.

    Raises:
      UserError: There is nothing of that name, or it has no side in PyTorch.
      RunFailed: The frameworks do different work, or the comparison failed or did not end.
    """
    with Process(name, "-m", "benchmarks.own", name) as process:
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
      save: Called with the first figures, then with those that replace them, and whether they do.

    Raises:
      UserError: As `check`, or the precision has no side in PyTorch.
      RunFailed: As `check`, or an engine failed.
    """
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
    save(found, Results([Group(timing.time_jobs(jobs[:2], FIRST_ROUNDS, budget.share(2), report), [])], notes), False)
    loop = [replace(jobs[0], feature="loop")] if found.has_loop else []
    with ExitStack() as stack:
        ceilings = [Job("copy", engine) for engine in ENGINES[:2]]
        ceilings += [Job("product", engine, jobs[0].product_precision) for engine in ENGINES[:2]]
        progress("ceilings: a copy and a product")
        beside = timing.warm_up(ceilings, stack, budget.share(3), report)
        progress(f"all engines, for {budget.remaining():.0f} s")
        try:
            timings = timing.time_jobs([*loop, *jobs], None, budget, report, beside)
        except RunFailed as error:
            if not str(error).startswith(job_label(jobs[-1])):
                raise
            report(f"left out: {error}")
            timings = timing.time_jobs([*loop, *jobs[:2]], None, budget, report, beside)
        save(found, Results([Group(timings, [taken for worker in beside if (taken := worker.take())])], notes), True)


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


if __name__ == "__main__":
    try:
        print(dumps(asdict(facts(sys.argv[1]))), flush=True)
    except RunFailed:
        raise
    except UserError as wrong:
        print(dumps({"wrong": str(wrong)}), flush=True)
