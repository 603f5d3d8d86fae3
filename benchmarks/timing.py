"""Interleaved timing: each job in its own process, turn by turn, so that a throttled machine slows all alike."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

import numpy as np

from benchmarks.budget import Budget, OutOfTime, select_jobs
from benchmarks.job import Job
from benchmarks.rows import job_label
from benchmarks.worker import WARM_UP
from jaxtrain.errors import RunFailed

Report = Callable[[str], None]
TURN = 5
"""Least steps per turn; the first of a turn finds cold caches and sleeping threads."""
TURN_S = 0.05
"""Least seconds per turn."""


@dataclass(frozen=True)
class Timing:
    """The seconds of a job's steps.

    Attributes:
      job: The job.
      wall: Seconds of each step by the clock, [steps].
      cpu: Seconds of each step, of all threads of the process, [steps].
      device, compile_s, warm_compile_s, flops, peak_bytes, predicted, units: As in `benchmarks.engines.Engine`.
      turns: Median seconds of a step in each turn, [rounds]; jobs of a group have the same rounds.
    """

    job: Job
    wall: np.ndarray
    cpu: np.ndarray
    device: str
    compile_s: float | None
    warm_compile_s: float | None
    flops: int | None
    peak_bytes: int
    predicted: Mapping[str, Any] = field(default_factory=dict)
    units: Sequence[Any] | None = None
    turns: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def lower_decile_s(self) -> float:
        """Seconds of a step on the undisturbed machine: others may slow it down, never speed it up."""
        return float(np.percentile(self.wall, 10))


class Process:
    """A Python subprocess that answers commands by JSON lines; killed at exit, with its own subprocesses.

    Args:
      label: Names the process in errors.
      arguments: Arguments of the Python interpreter.
    """

    def __init__(self, label: str, *arguments: str) -> None:
        self.label = label
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed at exit
        self.child = subprocess.Popen(
            [sys.executable, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.stdin, self.stdout, self.unread = self.child.stdin, self.child.stdout, b""
        self.killed = False

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.child.__exit__(kind, error, trace)  # closes its pipes
        self.errors.close()

    def kill(self) -> None:
        """Kill the process and its subprocesses."""
        self.killed = True
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    def ask(self, command: str, timeout: float) -> dict[str, Any]:
        """Send a command and return the answer. Raises as `receive`."""
        with suppress(BrokenPipeError):  # `receive` reports why
            self.stdin.write(f"{command}\n".encode())
        return self.receive(timeout)

    def finish(self, timeout: float) -> dict[str, Any]:
        """End the input and return the last answer. Raises as `receive`."""
        self.stdin.close()
        return self.receive(timeout)

    def receive(self, timeout: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
          RunFailed: The process ended; the message holds the last line of its standard error.
          OutOfTime: There is no answer after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while line := self._read_line(deadline):
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.child.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip() or f"exit status {self.child.returncode}").splitlines()[-1]
        raise RunFailed(f"{self.label}: {last}")

    def _read_line(self, deadline: float) -> bytes:
        """Return the next line of standard output, empty at its end. Raises `OutOfTime` after `deadline`."""
        while b"\n" not in self.unread:
            if not select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OutOfTime(self.label)
            chunk = self.stdout.read(1 << 16)
            if not chunk:
                return b""
            self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\n")
        return line + b"\n"


def start_worker(job: Job) -> Process:
    """Start the worker process of a job (`benchmarks.worker`)."""
    return Process(job_label(job), "-m", "benchmarks.worker", job.to_json())


@dataclass
class Worker:
    """A worker after its warm-up, with the seconds of its turns so far.

    Attributes:
      job: The job.
      process: Its process.
      step_s: Seconds of the last step of the warm-up.
      properties: What the process has told of its engine.
      wall: Seconds of the steps of each turn.
      cpu: The same, of all threads of the process.
    """

    job: Job
    process: Process
    step_s: float
    properties: Mapping[str, Any]
    wall: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)

    @property
    def turn_s(self) -> float:
        """Expected seconds of a turn."""
        return max(TURN * self.step_s, TURN_S)

    def timing(self, peak_bytes: int) -> Timing:
        """Return the turns so far."""
        return Timing(
            self.job,
            np.concatenate(self.wall),
            np.concatenate(self.cpu),
            peak_bytes=peak_bytes,
            turns=np.array([np.median(turn) for turn in self.wall]),
            **self.properties,
        )

    def take(self) -> Timing | None:
        """Return the turns so far, without a peak of memory, and forget them; None if there are none."""
        taken = self.timing(0) if self.wall else None
        self.wall, self.cpu = [], []
        return taken


def warm_up(jobs: Sequence[Job], stack: ExitStack, budget: Budget, report: Report) -> list[Worker]:
    """Start and warm up a worker for each job, one after the other; those that do not fit are skipped with a line.

    Args:
      jobs: The jobs.
      stack: Ends the processes when it is closed.
      budget: Time limit, of which one part is left for the turns.
      report: Called with the lines.

    Raises:
      RunFailed: A worker process failed.
    """
    found = []
    for i, job in enumerate(jobs):
        worker = _warm_up(job, stack.enter_context(start_worker(job)), budget.share(len(jobs) - i + 1), report)
        if worker is not None:
            found.append(worker)
    return found


def time_jobs(
    jobs: Sequence[Job], rounds: int | None, budget: Budget, report: Report, beside: Sequence[Worker] = ()
) -> list[Timing]:
    """Build the jobs' engines one after the other, then time them in turns (A B A B ...).

    A job that does not fit in the budget is skipped, and the rounds are reduced to fit; either is reported by a line.

    Args:
      jobs: Jobs to compare with each other.
      rounds: Turns of each; None for as many as fit in the budget.
      budget: Time limit of the whole.
      report: Called with the lines on skipped jobs and reduced work.
      beside: Workers that take a turn in every round too, and stay; `Worker.take` returns what they measured.

    Returns:
      The timings, in the order of `jobs`, without those skipped.

    Raises:
      RunFailed: A worker process failed.
    """
    with ExitStack() as stack:
        workers = warm_up(jobs, stack, budget, report)
        selected = select_jobs([worker.turn_s for worker in workers], budget.remaining() / 2)
        for i in {*range(len(workers))} - {*selected}:
            _skip(workers[i].job, workers[i].process, f"a step takes {workers[i].step_s:.2g} s", budget, report)
        workers, beside = [workers[i] for i in selected], [*beside] if selected else []
        round_s, done = sum(worker.turn_s for worker in (*workers, *beside)), 0
        while workers and done != rounds and (done == 0 or budget.remaining() > 1.5 * round_s):
            workers, beside = (
                [worker for worker in taking if _run_turn(worker, budget, report)] for taking in (workers, beside)
            )
            done += 1
        if workers and rounds is not None and done < rounds:
            job = workers[0].job
            report(f"{job.workload} in {job.precision}: {done} of {rounds} rounds, for the time limit")
        return [timing for worker in workers if (timing := _finish(worker, budget, report)) is not None]


def _warm_up(job: Job, process: Process, budget: Budget, report: Report) -> Worker | None:
    """Return the worker after its warm-up; None, with a line, if its first step shows that it cannot fit."""
    try:
        first = process.ask("first", budget.remaining())
        if first["note"]:
            report(first["note"])
        if first["first_s"] * (WARM_UP - 1) > budget.remaining():
            _skip(job, process, f"its first step took {first['first_s']:.1f} s", budget, report)
            return None
        warm = process.ask("warm", budget.remaining())
    except OutOfTime:
        _skip(job, process, "it was not ready in time", budget, report)
        return None
    return Worker(job, process, warm.pop("step_s"), warm)


def _run_turn(worker: Worker, budget: Budget, report: Report) -> bool:
    """Run one turn; False, with a line, if it did not end within the budget."""
    try:
        # The others need the rest.
        turn = worker.process.ask(f"turn {TURN} {TURN_S}", budget.remaining() * 3 / 4)
    except OutOfTime:
        _skip(worker.job, worker.process, "a turn did not end in time", budget, report)
        return False
    worker.wall.append(turn["wall"])
    worker.cpu.append(turn["cpu"])
    return True


def _finish(worker: Worker, budget: Budget, report: Report) -> Timing | None:
    try:
        peak = worker.process.finish(max(budget.remaining(), 5.0))
    except OutOfTime:
        _skip(worker.job, worker.process, "it did not end in time", budget, report)
        return None
    return worker.timing(**peak)


def _skip(job: Job, process: Process, reason: str, budget: Budget, report: Report) -> None:
    """Report a skipped job, and kill its process at once: it would slow down the others."""
    process.kill()
    report(f"skipped {job_label(job)}: {reason}{budget.remedy}")
