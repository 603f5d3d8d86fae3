"""Follow a run from its files with trackers, each in its own thread: their failures never affect the run."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from jaxtrain.folder_files import open_file, read_json, write_file
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.run_record import Record, read_record
from jaxtrain.run_folder import RunFolder

_POLL_EVERY = 1.0  # seconds between reads of metrics.jsonl
# Seconds to wait for the trackers at the end of a run that finished; of one that was stopped or failed.
_TIMEOUT, _SHORT_TIMEOUT = 60.0, 10.0


class Tracker(Protocol):
    """A service that runs are reported to. Its methods may raise and may block."""

    name: str
    """Names the package to install, and the file NAME.json in the run's folder."""

    def begin(self, record: Record, folder: Path, run_id: str | None) -> str:
        """Create a run there, or continue the run `run_id`; return its id."""

    def log(self, lines: Sequence[LogLine]) -> None:
        """Report new lines. After a rollback their steps were reported before."""

    def end(self, record: Record, exit_status: int) -> str:
        """Report that the run ended; return where it can be found."""


@contextmanager
def track_run(
    run: RunFolder, trackers: Sequence[Tracker], message: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Report `run` to trackers while the context lasts.

    A tracker that fails is reported once and dropped. The trackers raise nothing here.

    Args:
      run: The folder of the run.
      trackers: The trackers.
      message: Prints one line.

    Yields:
      A callback; call it with the exit status of the run, else the run counts as failed.
    """
    followers = [_Follower(run, tracker, message) for tracker in trackers]
    status = 1

    def set_status(exit_status: int) -> None:
        nonlocal status
        status = exit_status

    for follower in followers:
        follower.start()
    try:
        yield set_status
    finally:
        for follower in followers:
            follower.finish(status)
        timeout = _SHORT_TIMEOUT if status else _TIMEOUT
        deadline = time.monotonic() + timeout
        for follower in followers:
            follower.join(max(deadline - time.monotonic(), 0))
            if follower.is_alive():
                follower.silence()
                name = follower.tracker.name
                message(f"warning: {name} did not finish within {timeout:.0f} s: its copy of the run may be incomplete")


class _Follower(Thread):
    """Reports each line of metrics.jsonl to a tracker once, across all processes of a resumed run.

    NAME.json in the run's folder stores the tracker's id of the run and what was reported.
    """

    def __init__(self, run: RunFolder, tracker: Tracker, message: Callable[[str], None]) -> None:
        super().__init__(name=tracker.name, daemon=True)
        self.tracker = tracker
        self._run, self._message = run, message
        self._ended, self._exit_status = Event(), 1

    def finish(self, exit_status: int) -> None:
        """Report what is left, and the end of the run."""
        self._exit_status = exit_status
        self._ended.set()

    def silence(self) -> None:
        """Print nothing from now on."""
        self._message = lambda text: None

    def run(self) -> None:
        """Follow the run; never raise."""
        try:
            self._follow()
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._message(f"warning: {self.tracker.name} stopped tracking: {reason}")

    def _follow(self) -> None:
        while not self._run.metrics.exists():
            if self._ended.wait(_POLL_EVERY) and not self._run.metrics.exists():
                return  # the run never began
        state_file = self._run.path / f"{self.tracker.name}.json"
        state = read_json(state_file) if state_file.exists() else {}
        run_id = self.tracker.begin(read_record(self._run), self._run.path, state.get("id"))
        lines = _GrowingFile(self._run.metrics)
        unreported = _Unreported(state.get("last_step", -1), state.get("rollbacks", []))
        _write(state_file, {"id": run_id, **unreported.state()})
        while True:
            is_last = self._ended.is_set()  # read before the file: nothing is written to it afterwards
            if new := unreported.take(lines.read()):
                self.tracker.log(new)
                _write(state_file, {"id": run_id, **unreported.state()})
            if is_last:
                break
            self._ended.wait(_POLL_EVERY)
        self._message(f"{self.tracker.name}: {self.tracker.end(read_record(self._run), self._exit_status)}")


class _GrowingFile:
    """A metrics.jsonl that grows, or is replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, 0, 0

    def read(self) -> list[LogLine]:
        """Return the lines since the previous call; all lines if the file was replaced."""
        with open_file(self._path) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [LogLine.from_json(json.loads(line)) for line in complete.splitlines()]


class _Unreported:
    """Selects lines that were not reported yet.

    A restart repeats lines, which are skipped; after a rollback the same steps have new lines, which are not.

    >>> from jaxtrain.observe.log_line import Rollback
    >>> lines = [LogLine(step=4), LogLine(step=2, rollback=Rollback(4, 2, 9.0, 1)), LogLine(step=3)]
    >>> unreported = _Unreported(last_step=4, rollbacks=[])
    >>> [line.step for line in unreported.take(lines)]
    [2, 3]
    >>> [line.step for line in unreported.take([*lines[1:], LogLine(step=4)])]
    [4]
    """

    def __init__(self, last_step: int, rollbacks: list[list[int]]) -> None:
        self._last_step, self._rollbacks = last_step, rollbacks

    def state(self) -> dict[str, Any]:
        """Return what was reported, as JSON."""
        return {"last_step": self._last_step, "rollbacks": self._rollbacks}

    def take(self, lines: Sequence[LogLine]) -> list[LogLine]:
        """Return the lines that were not reported yet; they count as reported from now on."""
        new = []
        for line in lines:
            if line.rollback:
                rollback = [line.step, line.rollback.from_step, line.rollback.batches_skipped]
                if rollback not in self._rollbacks:
                    self._rollbacks.append(rollback)
                    self._last_step = line.step - 1
            if line.step > self._last_step:
                new.append(line)
                self._last_step = line.step
        return new


def _write(path: Path, state: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(state) + "\n")
