"""Trackers are told every line once, and no run feels what befalls them."""

import json
import threading
import time

import pytest

from jaxtrain.observe import Rollback, tracking, write_result
from jaxtrain.observe.tracking import track_run

from .runs import line, write_run


class Told:
    """A tracker that remembers."""

    name = "told"

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
def eager(monkeypatch):
    monkeypatch.setattr(tracking, "_POLL_EVERY", 0.01)


def append(run, *lines: dict) -> None:
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in lines))


def until(true) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("never")


def test_lines_are_told_as_they_come_and_the_end_with_its_sample(tmp_path):
    run, tracker, said = write_run(tmp_path / "run", steps=20), Told(), []
    with track_run(run, [tracker], said.append) as ended:
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
    assert said == ["told: there"]


def test_another_process_of_the_run_goes_on_where_the_last_one_was(tmp_path):
    run, first, second = write_run(tmp_path / "run", steps=30), Told(), Told()
    with track_run(run, [first], print) as ended:
        ended(143)
    assert first.ended == (143, None)
    # Killed, it goes back to its checkpoint at 20: the lines since are written anew, the same.
    kept = run.metrics.read_text().splitlines(keepends=True)[:3]
    with track_run(run, [second], print) as ended:
        partial = run.metrics.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(run.metrics)
        append(run, line(30), line(40))
        ended(0)
    assert (second.known, second.steps) == ("id-1", [40])


def test_what_a_rollback_writes_anew_is_told_anew_and_once(tmp_path):
    run, tracker = write_run(tmp_path / "run", steps=30), Told()
    with track_run(run, [tracker], print) as ended:
        until(lambda: tracker.steps == [0, 10, 20, 30])
        kept = run.metrics.read_text().splitlines(keepends=True)[:2]
        partial = run.metrics.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(run.metrics)
        append(run, {**line(11), **Rollback(31, 10, 9.0, 4).to_json()}, line(20), line(30), line(40))
        ended(0)
    assert tracker.steps == [0, 10, 20, 30, 11, 20, 30, 40]
    again = Told()
    with track_run(run, [again], print) as ended:
        ended(0)
    assert again.steps == []


@pytest.mark.parametrize("fail", ["begin", "log", "end"])
@pytest.mark.parametrize("error", [RuntimeError("no route\nto host"), SystemExit(1), OSError(28, "No space left")])
def test_one_that_fails_is_told_once_and_harms_neither_the_run_nor_another(fail, error, tmp_path):
    run, tracker, other, said = write_run(tmp_path / "run", steps=20), Told(fail, error), Told(), []
    other.name = "other"
    with track_run(run, [tracker, other], said.append) as ended:
        append(run, line(30), line(40))
        ended(0)
    assert other.steps == [0, 10, 20, 30, 40]
    (warning,) = [text for text in said if text.startswith("warning")]
    assert warning.startswith("warning: told stopped tracking: ")
    assert "\n" not in warning


def test_one_that_hangs_is_not_waited_for_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_SHORT_TIMEOUT", 0.2)
    run, tracker, said, go = write_run(tmp_path / "run"), Told(), [], threading.Event()
    tracker.log = lambda lines: go.wait(20)
    begin = time.monotonic()
    with pytest.raises(KeyError), track_run(run, [tracker], said.append):
        raise KeyError("what the run itself says")
    assert time.monotonic() - begin < 5
    assert said == ["warning: told did not finish within 0 s: its copy of the run may be incomplete"]
    go.set()
    time.sleep(0.1)
    assert len(said) == 1


def test_a_run_that_never_begins_is_told_to_no_one(tmp_path):
    run, tracker, said = write_run(tmp_path / "run"), Told("begin"), []
    run.metrics.unlink()
    with pytest.raises(KeyError), track_run(run, [tracker], said.append):
        raise KeyError
    assert said == []
