"""The measurement of a suite: equality of the work, then timings beside the machine's ceilings, in a time limit."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks import equality, timing
from benchmarks.budget import Budget
from benchmarks.job import Job
from benchmarks.suites import Suite
from benchmarks.timing import Report, Timing
from benchmarks.workloads import WORKLOADS


class Group(NamedTuple):
    """Timings from the same rounds.

    Attributes:
      timings: Those of the jobs that are compared.
      ceilings: Those of the ceilings.
    """

    timings: list[Timing]
    ceilings: list[Timing]


@dataclass
class Results:
    """The measurements so far.

    Attributes:
      groups: The suite's groups.
      notes: Lines on skipped jobs and reduced work.
    """

    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def timings(self) -> list[Timing]:
        """All jobs' timings."""
        return [timing for group in self.groups for timing in group.timings]


def measure(suite: Suite, budget: Budget, progress: Report, note: Report, save: Callable[[Results], None]) -> Results:
    """Measure a suite; work that does not fit in the budget is reduced or skipped.

    Args:
      suite: What to measure.
      budget: Time limit of the whole.
      progress: Called with what is measured next.
      note: Called with a line for each reduced or skipped piece of work.
      save: Called with the results after each group.

    Returns:
      The results.

    Raises:
      RunFailed: Engines do different work, or one failed; what was measured before has been saved.
    """
    results = Results()

    def report(line: str) -> None:
        results.notes.append(line)
        note(line)

    jobs = [job for group in suite.groups for job in group]
    ceilings = [Job("copy", engine) for engine in ("jax", "torch_eager") if suite.ceilings]
    ceilings += [Job("product", engine, precision) for precision in suite.ceilings for engine in ("jax", "torch_eager")]
    checked = [name for name in dict.fromkeys(job.workload for job in jobs) if name in WORKLOADS]
    parts = len(checked) + 1 + len(suite.groups)
    skipped = set()
    for name in checked:
        progress(f"{name}: checking in float64 that the engines do the same work")
        if not equality.verify([job for job in jobs if job.workload == name], budget.share(parts), report):
            skipped.add(name)
        parts -= 1
    with ExitStack() as stack:
        if ceilings:
            progress(f"ceilings: a copy, and a product in {', '.join(suite.ceilings)}")
        workers = timing.warm_up(ceilings, stack, budget.share(parts), report)
        parts -= 1
        for group in suite.groups:
            if group[0].workload not in skipped:
                label = f"{group[0].workload} in {group[0].precision}"
                progress(f"{label}: timing {', '.join(job.engine for job in group)}")
                precisions = {job.product_precision for job in group}
                beside = [
                    worker
                    for worker in workers
                    if not worker.process.killed
                    and (worker.job.workload == "copy" or worker.job.precision in precisions)
                ]
                timings = timing.time_jobs(group, suite.rounds, budget.share(parts), report, beside)
                results.groups.append(Group(timings, [taken for worker in beside if (taken := worker.take())]))
                save(results)
            parts -= 1
    return results
