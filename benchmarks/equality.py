"""The float64 check that engines do the same work: where their losses differ, their times mean nothing.

`python -m benchmarks.equality JOBS` checks the jobs of one workload in a separate process, which enables JAX's x64 mode
and releases its memory before anything is timed.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks.budget import Budget, OutOfTime
from benchmarks.job import Job
from benchmarks.timing import Process, Report
from benchmarks.workloads import WORKLOADS
from jaxtrain.errors import RunFailed

STEPS = 3
"""Steps of each engine; the losses of the second and third depend on the gradients and updates before them."""
BAR = 1e-8
"""Largest relative difference of two losses in float64."""


def verify(jobs: Sequence[Job], budget: Budget, report: Report) -> bool:
    """Check in a subprocess that the jobs of one workload do the same work.

    Args:
      jobs: Jobs of one workload, with their timed settings.
      budget: Time limit of the check.
      report: Called with a line if the check does not end within the budget.

    Returns:
      False if the check did not end within the budget.

    Raises:
      RunFailed: The engines do different work, or one of them failed.
    """
    workload = jobs[0].workload
    line = json.dumps([asdict(job) for job in float64_jobs(jobs)])
    with Process(f"{workload} in fp64", "-m", "benchmarks.equality", line) as process:
        try:
            answer = process.receive(budget.remaining())
        except OutOfTime:
            report(f"skipped {workload}: its float64 check did not end in time{budget.remedy}")
            return False
    if answer["difference"]:
        raise RunFailed(answer["difference"])
    return True


def float64_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that check `jobs`: each setting once per framework, in float64, at the workload's check sizes.

    Compiled PyTorch is the eager model behind PyTorch's own compiler and is not checked separately.
    """
    workload = WORKLOADS[jobs[0].workload]
    checks: list[Job] = []
    for job in jobs:
        rows = {**workload.sizes, **workload.check_sizes}["rows"] * job.accumulate
        engine = "torch_eager" if job.engine.startswith("torch") else job.engine
        # PyTorch's kernels of attention do not compute in float64.
        feature = "" if job.engine.startswith("torch") else job.feature
        sizes = {**workload.check_sizes, "rows": rows}
        check = replace(job, engine=engine, precision="fp64", sizes=sizes, feature=feature)
        if check not in checks:
            checks.append(check)
    return checks


def losses(job: Job) -> list[float]:
    """Return the losses of the first `STEPS` steps of a float64 job."""
    import jax

    from benchmarks.engines import engine

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        built = engine(job, WORKLOADS[job.workload])
        for _ in range(STEPS):
            built.step()
    return built.losses


def check_same_work(jobs: Sequence[Job], losses: Sequence[Sequence[float]]) -> None:
    """Compare float64 losses within `BAR`.

    Each job is compared with the first of the same sizes and feature. The first of a feature is compared with the first
    of the same sizes by its first loss only: the next follows an update that may differ, for example by clipping.

    Args:
      jobs: Float64 jobs of one workload.
      losses: The losses of each job.

    Raises:
      RunFailed: Two jobs do different work.
    """
    for i, (job, found) in enumerate(zip(jobs, losses, strict=True)):
        alike = [j for j in range(i + 1) if jobs[j].sizes == job.sizes]
        first = next(j for j in alike if jobs[j].feature == job.feature)
        if first == i:
            first = alike[0]
        compared = None if job.feature == jobs[first].feature else 1
        pairs = zip(found[:compared], losses[first][:compared], strict=True)
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        if not difference <= BAR:
            raise RunFailed(
                f"{job.workload}: {job.engine} and {jobs[first].engine} do different work: float64 losses "
                f"{[*found]} and {[*losses[first]]}, relative difference {difference:.1e} above {BAR:.0e}"
            )


def difference(line: str) -> str:
    """Run a JSON list of float64 jobs; return the message on their difference, "" if they do the same work."""
    jobs = [Job(**fields) for fields in json.loads(line)]
    try:
        check_same_work(jobs, [losses(job) for job in jobs])
    except RunFailed as error:
        return str(error)
    return ""


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(json.dumps({"difference": difference(sys.argv[1])}), flush=True)
