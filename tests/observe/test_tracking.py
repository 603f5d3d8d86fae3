"""Trackers receive every line once, and their failures never affect the run."""

import json
import threading
import time

import pytest

from jaxtrain.observe import Rollback, write_result
from jaxtrain.observe.dashboards import tracking
from jaxtrain.observe.dashboards.tracking import track_run

from .runs import line, write_run


class RecordingTracker:
    """A tracker that records its calls."""

    name = "recorder"

    def __init__(self, fail: str = "", error: BaseException | None = None) -> None:
        self.steps: list[int] = []
        self.known: str | None = None
        self.ended: tuple | None = None
        self._fail, self._error = fail, error or RuntimeError("no route\nto host")

    def _at(self, what: str) -> None:
        if what == self._fail:
            raise self._error

    def begin(self, record, folder, known):
        self._at("begin")
        self.known = known
        return "id-1"

    def log(self, lines):
        self._at("log")
        self.steps += [line.step for line in lines]

    def end(self, record, exit_status):
        self._at("end")
        self.ended = exit_status, record.sample
        return "there"


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch):
    monkeypatch.setattr(tracking, "_POLL_EVERY", 0.01)


def append(run, *lines: dict) -> None:
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in lines))


def until(true) -> None:
    for _ in range(6_000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("never")


def test_lines_are_reported_when_written_and_the_end_with_the_sample(tmp_path):
    run, tracker, messages = write_run(tmp_path / "run", steps=20), RecordingTracker(), []
    with track_run(run, [tracker], messages.append) as ended:
        until(lambda: tracker.steps == [0, 10, 20])
        with run.metrics.open("a") as file:
            file.write(json.dumps(line(30))[:20])
            file.flush()
            time.sleep(0.05)
            file.write(json.dumps(line(30))[20:] + "\n")
        until(lambda: tracker.steps[-1] == 30)
        append(run, line(40))
        write_result(run, step=40, references={}, sample="text")
        ended(0)
    assert tracker.steps == [0, 10, 20, 30, 40]
    assert tracker.ended == (0, "text")
    assert messages == ["recorder: there"]


def test_a_resumed_run_reports_only_new_lines(tmp_path):
    run, first, second = write_run(tmp_path / "run", steps=30), RecordingTracker(), RecordingTracker()
    with track_run(run, [first], print) as ended:
        ended(143)
    assert first.ended == (143, None)
    # After a kill the run resumes from step 20 and writes the same lines again.
    kept = run.metrics.read_text().splitlines(keepends=True)[:3]
    with track_run(run, [second], print) as ended:
        partial = run.metrics.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(run.metrics)
        append(run, line(30), line(40))
        ended(0)
    assert (second.known, second.steps) == ("id-1", [40])


def test_lines_after_a_rollback_are_reported_again_once(tmp_path):
    run, tracker = write_run(tmp_path / "run", steps=30), RecordingTracker()
    with track_run(run, [tracker], print) as ended:
        until(lambda: tracker.steps == [0, 10, 20, 30])
        kept = run.metrics.read_text().splitlines(keepends=True)[:2]
        partial = run.metrics.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(run.metrics)
        append(run, {**line(11), **Rollback(31, 10, 9.0, 4).to_json()}, line(20), line(30), line(40))
        ended(0)
    assert tracker.steps == [0, 10, 20, 30, 11, 20, 30, 40]
    again = RecordingTracker()
    with track_run(run, [again], print) as ended:
        ended(0)
    assert again.steps == []


@pytest.mark.parametrize("fail", ["begin", "log", "end"])
@pytest.mark.parametrize("error", [RuntimeError("no route\nto host"), SystemExit(1), OSError(28, "No space left")])
def test_a_failing_tracker_is_reported_once_and_affects_nothing_else(fail, error, tmp_path):
    run, tracker, other, messages = (
        write_run(tmp_path / "run", steps=20),
        RecordingTracker(fail, error),
        RecordingTracker(),
        [],
    )
    other.name = "other"
    with track_run(run, [tracker, other], messages.append) as ended:
        append(run, line(30), line(40))
        ended(0)
    assert other.steps == [0, 10, 20, 30, 40]
    (warning,) = [text for text in messages if text.startswith("warning")]
    assert warning.startswith("warning: recorder stopped tracking: ")
    assert "\n" not in warning


def test_a_hanging_tracker_delays_the_run_only_briefly(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_SHORT_TIMEOUT", 0.2)
    run, tracker, messages, go = write_run(tmp_path / "run"), RecordingTracker(), [], threading.Event()
    returned = []
    tracker.log = lambda lines: returned.append(go.wait(60))
    with pytest.raises(KeyError), track_run(run, [tracker], messages.append):
        raise KeyError("error of the run")
    assert not returned  # the tracker hangs still
    assert messages == ["warning: recorder did not finish within 0 s: its copy of the run may be incomplete"]
    go.set()
    time.sleep(0.1)
    assert len(messages) == 1


def test_a_run_that_never_begins_is_not_reported(tmp_path):
    run, tracker, messages = write_run(tmp_path / "run"), RecordingTracker("begin"), []
    run.metrics.unlink()
    with pytest.raises(KeyError), track_run(run, [tracker], messages.append):
        raise KeyError
    assert messages == []
