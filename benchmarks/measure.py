"""The measurement of a suite: equality of the work, then ceilings, then timings, within a time limit."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import equality, timing
from benchmarks.budget import Budget
from benchmarks.ceiling import CEILINGS
from benchmarks.job import Job
from benchmarks.suites import Suite
from benchmarks.timing import Report, Timing
from benchmarks.workloads import WORKLOADS

CEILING_ROUNDS = 2


@dataclass
class Results:
    """The measurements so far.

    Attributes:
      ceilings: Timings of the ceilings.
      timings: Timings of the suite's jobs.
      notes: Lines on skipped jobs and reduced work.
    """

    ceilings: list[Timing] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(suite: Suite, budget: Budget, progress: Report, note: Report, save: Callable[[Results], None]) -> Results:
    """Measure a suite; work that does not fit in the budget is reduced or skipped.

    Args:
      suite: What to measure.
      budget: Time limit of the whole.
      progress: Called with what is measured next.
      note: Called with a line for each reduced or skipped piece of work.
      save: Called with the results after the ceilings and after each group.

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
    ceiling_jobs = [
        Job(what, engine, precision)
        for precision in suite.ceilings
        for what in CEILINGS
        for engine in ("jax", "torch_eager")
    ]
    checked = [name for name in dict.fromkeys(job.workload for job in jobs) if name in WORKLOADS]
    parts = len(checked) + 1 + len(suite.groups)
    skipped = set()
    for name in checked:
        progress(f"{name}: checking in float64 that the engines do the same work")
        if not equality.verify([job for job in jobs if job.workload == name], budget.share(parts), report):
            skipped.add(name)
        parts -= 1
    ceiling_budget = budget.share(parts)
    for i, job in enumerate(ceiling_jobs):
        progress(f"ceiling: {job.workload} by {job.engine} in {job.precision}")
        share = ceiling_budget.share(len(ceiling_jobs) - i)
        results.ceilings += timing.time_jobs([job], CEILING_ROUNDS, share, report)
    save(results)
    parts -= 1
    for group in suite.groups:
        if group[0].workload not in skipped:
            progress(f"{group[0].workload} in {group[0].precision}: timing {', '.join(job.engine for job in group)}")
            results.timings += timing.time_jobs(group, suite.rounds, budget.share(parts), report)
            save(results)
        parts -= 1
    return results
