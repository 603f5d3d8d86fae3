"""Trackers follow a run from its files, each in a thread of its own: the run does not feel what befalls them."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from jaxtrain.observe.record import Record, read_record
from jaxtrain.run_folder import RunFolder

_EVERY = 1.0  # seconds between two looks at metrics.jsonl
# Seconds that a run waits for its trackers, when it is done; when it was told to stop, or failed.
_PATIENCE, _IN_HASTE = 60.0, 10.0


class Tracker(Protocol):
    """A place that runs are told to."""

    name: str

    def begin(self, record: Record, folder: Path, known: str | None) -> str:
        """Begin a run there, or go on with the one `known` by its id: that id."""

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Tell lines of metrics.jsonl: a line after a rollback has a step that was told before."""

    def end(self, record: Record, exit_status: int) -> str:
        """Tell that it ended: where it is to be found."""


@contextmanager
def track_run(
    run: RunFolder, trackers: Sequence[Tracker], say: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Have the trackers follow `run` while this lasts; what it gives is to be told the exit status.

    What goes wrong with one is said once, and it follows no further. Raises nothing.
    """
    followers = [_Follower(run, tracker, say) for tracker in trackers]
    status = [1]
    for follower in followers:
        follower.start()
    try:
        yield lambda exit_status: status.__setitem__(0, exit_status)
    finally:
        for follower in followers:
            follower.finish(status[0])
        patience = _IN_HASTE if status[0] else _PATIENCE
        deadline = time.monotonic() + patience
        for follower in followers:
            follower.join(max(deadline - time.monotonic(), 0))
            if follower.is_alive():
                follower.give_up()
                name = follower.tracker.name
                say(f"warning: {name} has not taken all within {patience:.0f} s: the run is whole, its copy may not be")


class _Follower(Thread):
    """Tells a tracker each line of metrics.jsonl once, over all the processes that a run takes.

    A file of the tracker's name in the run's folder holds the id of the run there and what was told.
    """

    def __init__(self, run: RunFolder, tracker: Tracker, say: Callable[[str], None]) -> None:
        super().__init__(name=tracker.name, daemon=True)
        self.tracker = tracker
        self._run, self._say = run, say
        self._ended, self._exit_status = Event(), 1

    def finish(self, exit_status: int) -> None:
        """Tell what is left, and that it is the end."""
        self._exit_status = exit_status
        self._ended.set()

    def give_up(self) -> None:
        """Say no more."""
        self._say = lambda text: None

    def run(self) -> None:
        """Follow, and never raise."""
        try:
            self._follow()
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split())[:300] or type(error).__name__
            self._say(f"warning: {self.tracker.name} follows no further: {said}")

    def _follow(self) -> None:
        while not self._run.metrics.exists():
            if self._ended.wait(_EVERY) and not self._run.metrics.exists():
                return  # it never began
        place = self._run.path / f"{self.tracker.name}.json"
        known = json.loads(place.read_text()) if place.exists() else {}
        identity = self.tracker.begin(read_record(self._run), self._run.path, known.get("id"))
        lines, news = _Lines(self._run.metrics), _News(known.get("told", -1), known.get("rollbacks", []))
        _write(place, {"id": identity, "told": news.told, "rollbacks": news.rollbacks})
        while True:
            last = self._ended.is_set()  # asked before the look: nothing is written after it
            if fresh := news.of(lines.read()):
                self.tracker.log(fresh)
                _write(place, {"id": identity, "told": news.told, "rollbacks": news.rollbacks})
            if last:
                break
            self._ended.wait(_EVERY)
        self._say(f"{self.tracker.name}: {self.tracker.end(read_record(self._run), self._exit_status)}")


class _Lines:
    """A metrics.jsonl that grows, or is replaced by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._read = path, 0, 0

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last time; all of them of a file that took the place of the last one."""
        with self._path.open("rb") as file:
            now = os.fstat(file.fileno()).st_ino
            if now != self._file:
                self._file, self._read = now, 0
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class _News:
    """What of the lines was not told yet. After a restart its steps are the same; after a rollback they are others.

    >>> news = _News(told=4, rollbacks=[])
    >>> news.of([{"step": 4}, {"step": 2, "rolled_back_from": 4}, {"step": 3}])
    [{'step': 2, 'rolled_back_from': 4}, {'step': 3}]
    >>> news.of([{"step": 2, "rolled_back_from": 4}, {"step": 3}, {"step": 4}])
    [{'step': 4}]
    """

    def __init__(self, told: int, rollbacks: list[list[int]]) -> None:
        self.told, self.rollbacks = told, rollbacks

    def of(self, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of the lines that are news, which they are no more."""
        news = []
        for line in lines:
            rollback = [line["step"], line.get("rolled_back_from"), line.get("batches_skipped")]
            if "rolled_back_from" in line and rollback not in self.rollbacks:
                self.rollbacks.append(rollback)
                self.told = line["step"] - 1
            if line["step"] > self.told:
                news.append(line)
                self.told = line["step"]
        return news


def _write(path: Path, of: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(of) + "\n")
    partial.replace(path)
