"""Which process of a run the others wait for: each one publishes its step and phase, and the first one compares them.

A step is a collective of all processes. One that reads its data slowly, or is stopped, shows in the others as a long
step; its own step and phase tell the difference. What is slow on its devices alone is not seen here.
"""

import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from jaxtrain.distributed import processes
from jaxtrain.runner.session import Phase

REPORT_SECONDS = 2.0
"""Seconds between two reports of a process."""
LATE_SECONDS = 10.0
"""A process is late if another one has waited for it for this long."""
SILENT_SECONDS = 6.0
"""A process is late if it has not reported for this long: less than the heartbeat takes to end the run."""
HANG_SECONDS = 60.0
"""A step hangs if all processes have been in it for this long, and for ten times the mean step."""
WINDOW_SECONDS = 10.0
"""Processes are compared over windows of at least this length."""
SLOW_FACTOR, SLOW_SHARE, SLOW_SECONDS = 2.0, 0.2, 0.02
"""A straggler's host takes more than this factor of the others' median, and this share of a step and seconds more."""


# The order within a step, and the phases in which a process waits for the others.
_ORDER = {Phase.COMPILE: 0, Phase.READ: 0, Phase.STEP: 1, Phase.EVALUATE: 2, Phase.LOG: 3, Phase.SAVE: 4}
_WAITING = (Phase.STEP, Phase.EVALUATE, Phase.SAVE)


class Report(NamedTuple):
    """What a process publishes."""

    number: int
    """Number of the report."""
    step: int
    phase: Phase
    read_s: float
    """Seconds since the start spent reading data."""
    log_s: float
    """Seconds since the start spent on logging."""

    @property
    def place(self) -> tuple[int, int]:
        """How far the process is."""
        return self.step, _ORDER[self.phase]

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `json.dumps` wrote."""
        number, step, phase, read_s, log_s = json.loads(text)
        return cls(number, step, Phase(phase), read_s, log_s)


@dataclass
class Peer:
    """A process as the first one sees it, by its own clock."""

    report: Report
    reported_at: float
    moved_at: float
    """When its step or phase changed."""
    first: Report
    """The report at the start of the window."""

    def update(self, report: Report, now: float) -> None:
        """Take a report, which may be the last one again."""
        if report.number != self.report.number:
            self.reported_at = now
        if report.place != self.report.place:
            self.moved_at = now
        self.report = report


class Straggler(NamedTuple):
    """A process whose host is slower than those of the others."""

    process: int
    host_s: float
    """Seconds a step that its host spends on reading data and logging."""
    others_s: float
    """The median of the other processes."""
    phase: Phase
    """Where it spends most of them."""

    def message(self) -> str:
        """Return a warning."""
        return (
            f"warning: process {self.process} is slow: its host takes {self.host_s:.2g} s a step, mostly {self.phase}, "
            f"those of the others {self.others_s:.2g} s: they wait for it; check its disk, network and load"
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers by their keys in metrics.jsonl."""
        return {"straggler": self.process, "straggler_host_s": self.host_s, "others_host_s": self.others_s}


@dataclass
class Peers:
    """All processes, as the first one sees them."""

    count: int
    began_at: float
    seen: dict[int, Peer] = field(default_factory=dict)
    _named: set[tuple[int, int]] = field(default_factory=set)
    _window_at: float | None = None
    _first_step: int | None = None

    def update(self, reports: Mapping[int, Report], now: float) -> None:
        """Take the newest report of each process."""
        if self._first_step is None and reports:
            self._first_step = min(report.step for report in reports.values())
        for process, report in reports.items():
            if process in self.seen:
                self.seen[process].update(report, now)
            else:
                self.seen[process] = Peer(report, now, now, report)

    def late(self, now: float) -> list[str]:
        """Return a line for each process that the others wait for, once for each step; or one if a step hangs."""
        if not self.seen:
            return []
        front = max(peer.report.place for peer in self.seen.values())
        waiting = [
            peer.moved_at for peer in self.seen.values() if peer.report.place == front and peer.report.phase in _WAITING
        ]
        lines = []
        for process in range(self.count):
            peer = self.seen.get(process)
            silent_s = now - (peer.reported_at if peer else self.began_at)
            is_behind = bool(waiting) and (peer is None or peer.report.place < front)
            late_s = now - min(waiting) if is_behind else 0.0
            step, phase = (peer.report.step, peer.report.phase) if peer else (0, Phase.COMPILE)
            # Compiling may hold the lock of the interpreter, which reports need: no warning until others wait.
            is_alone = phase is Phase.COMPILE and not is_behind
            is_silent = silent_s >= (HANG_SECONDS if is_alone else SILENT_SECONDS)
            if not (is_silent or late_s >= LATE_SECONDS) or (process, step) in self._named:
                continue
            self._named.add((process, step))
            self._window_at = None  # a single wait is not the speed of a process
            if is_silent:  # it may have gone on since its last report
                lines.append(
                    f"warning: process {process} has not reported for {silent_s:.0f} s, since step {step} ({phase})"
                )
            else:
                lines.append(f"warning: process {process} is {late_s:.0f} s behind at step {step} ({phase})")
        if not lines and len(waiting) == self.count and front[1] == _ORDER[Phase.STEP]:
            lines = self._hang(front[0], now - max(waiting), now)
        return lines

    def _hang(self, step: int, seconds: float, now: float) -> list[str]:
        mean = (now - seconds - self.began_at) / max(step - (self._first_step or 0), 1)
        if seconds < max(HANG_SECONDS, 10 * mean) or (-1, step) in self._named:
            return []
        self._named.add((-1, step))
        return [
            f"warning: all {self.count} processes have been in step {step} for {seconds:.0f} s: the network or a "
            "device may hang; if it goes on, stop the run and continue with --resume auto"
        ]

    def straggler(self, now: float) -> Straggler | None:
        """Return the slowest process of the window that ends now, if it is slow, and begin the next one."""
        begin = self._window_at
        if begin is not None and now - begin < WINDOW_SECONDS:
            return None
        self._window_at = now
        steps = {i: peer.report.step - peer.first.step for i, peer in self.seen.items()}
        spent = {
            i: (peer.report.read_s - peer.first.read_s, peer.report.log_s - peer.first.log_s)
            for i, peer in self.seen.items()
        }
        for peer in self.seen.values():
            peer.first = peer.report
        if begin is None or len(steps) < 2 or min(steps.values()) < 1:
            return None
        host = {i: sum(spent[i]) / steps[i] for i in steps}
        slowest = max(host, key=lambda i: host[i])
        others = statistics.median(host[i] for i in host if i != slowest)
        excess = host[slowest] - others
        step_s = (now - begin) / max(steps.values())
        if host[slowest] <= SLOW_FACTOR * others or excess <= max(SLOW_SHARE * step_s, SLOW_SECONDS):
            return None
        read_s, log_s = spent[slowest]
        return Straggler(slowest, host[slowest], others, Phase.READ if read_s >= log_s else Phase.LOG)


class ProcessWatch:
    """While entered, publishes what this process does; in the first one, warns of processes that the others wait for.

    Args:
      message: Prints one line.
    """

    def __init__(self, message: Callable[[str], None]) -> None:
        self._message = message
        self._now: tuple[int, Phase, float] = 0, Phase.COMPILE, time.monotonic()
        self._spent = dict.fromkeys(Phase, 0.0)
        self._peers = Peers(processes.count(), time.monotonic())
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._slow: int | None = None
        self._is_one_of_many = processes.count() > 1
        self._thread = threading.Thread(target=self._watch, name="process watch", daemon=True)

    def __enter__(self) -> "ProcessWatch":
        if self._is_one_of_many:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._is_one_of_many:
            self._thread.join(timeout=1)  # it may wait for a process that is gone

    def enter(self, phase: Phase, step: int) -> None:
        """Enter a phase of a step."""
        now = time.monotonic()
        _, last, since = self._now
        self._spent[last] += now - since
        self._now = step, phase, now

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logged line, in the first process: those of a straggler; warns of a new one."""
        if not (self._is_one_of_many and processes.is_first()):
            return {}
        with self._lock:
            slow = self._peers.straggler(time.monotonic())
        if slow is None:
            return {}
        if slow.process != self._slow:
            self._message(slow.message())
        self._slow = slow.process
        return slow.metrics()

    def _watch(self) -> None:
        for number in itertools.count(1):
            step, phase, since = self._now
            spent = {**self._spent, phase: self._spent[phase] + time.monotonic() - since}
            report = Report(number, step, phase, spent[Phase.READ], spent[Phase.LOG])
            try:
                processes.publish("progress", json.dumps(report))
                if processes.is_first():
                    self._compare(processes.published("progress"))
            except (RuntimeError, ValueError):  # the first process has ended, and the store with it
                return
            if self._ended.wait(REPORT_SECONDS):
                return

    def _compare(self, texts: Mapping[int, str]) -> None:
        now = time.monotonic()
        with self._lock:
            self._peers.update({process: Report.from_json(text) for process, text in texts.items()}, now)
            lines = self._peers.late(now)
        for line in lines:
            self._message(line)
