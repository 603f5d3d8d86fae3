"""Timing jobs turn by turn, each in its own process, so that a throttled machine slows all alike."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import numpy as np

from benchmarks.job import Job
from jaxtrain.errors import RunFailed

TURN = 5
"""Steps to a turn, at least; and as many as take `TURN_S`: the first finds the caches cold and the threads asleep."""
TURN_S = 0.05


@dataclass(frozen=True)
class Timing:
    """`wall` and `cpu`: seconds of every step [steps], of the clock and of all the process's threads. The rest as
    `benchmarks.engines.Engine` has it."""

    job: Job
    wall: np.ndarray
    cpu: np.ndarray
    losses: list[float]
    device: str
    compile_s: float | None
    warm_compile_s: float | None
    flops: int | None
    peak_bytes: int

    @property
    def lower_decile_s(self) -> float:
        """The machine may be throttled by others, never sped up: this is the engine, the median is the day."""
        return float(np.percentile(self.wall, 10))


class Process:
    """The worker of a job; at exit it is ended, and what is left of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed at exit
        self.child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", job.as_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.kill()
        self.child.__exit__(kind, error, trace)  # which closes its pipes
        self.errors.close()

    def heard(self) -> dict[str, Any]:
        """Its next line."""
        assert self.child.stdout is not None
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        self.child.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip() or f"exit status {self.child.returncode}").splitlines()[-1]
        raise RunFailed(f"{self.job.workload} by {self.job.engine} in {self.job.precision}: {last}")

    def turn(self, steps: int, seconds: float) -> dict[str, Any]:
        """The seconds of each of some steps, which take so many together."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"turn {steps} {seconds}\n")
        self.child.stdin.flush()
        return self.heard()

    def ended(self) -> dict[str, Any]:
        """Its last words."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.heard()


def timed(jobs: Sequence[Job], rounds: int, told: Callable[[str], None]) -> list[Timing]:
    """Each job built alone, then all of them timed, A B A B, for `rounds` turns each; `told` how far it is.

    Raises `RunFailed`, with its last line, where a process ends before its time.
    """
    with ExitStack() as stack:
        processes, built = [], []
        for job in jobs:
            told(f"{job.workload}: {job.engine} {job.precision} {job.feature} starts".replace("  ", " "))
            processes.append(stack.enter_context(Process(job)))
            built.append(processes[-1].heard())
        seconds: list[list[dict[str, Any]]] = [[] for _ in jobs]
        for i in range(rounds):
            told(f"{jobs[0].workload}: round {i + 1} of {rounds}")
            for process, turns in zip(processes, seconds, strict=True):
                turns.append(process.turn(TURN, TURN_S))
        peaks = [process.ended() for process in processes]
    return [
        Timing(job, _joined(turns, "wall"), _joined(turns, "cpu"), **said, **peak)
        for job, turns, said, peak in zip(jobs, seconds, built, peaks, strict=True)
    ]


def _joined(turns: Sequence[dict[str, Any]], clock: str) -> np.ndarray:
    return np.concatenate([turn[clock] for turn in turns])
