"""Which process of a run the others wait for, from the reports of all of them."""

import pytest

from jaxtrain.labs.process_watch import Peers, Phase, Report

STEP, READ, LOG, EVALUATE, COMPILE = Phase.STEP, Phase.READ, Phase.LOG, Phase.EVALUATE, Phase.COMPILE


class Clock:
    """Reports every second what the processes do."""

    def __init__(self, count: int) -> None:
        self.peers, self.now = Peers(count, 0.0), 0.0
        self.spent = [[0.0, 0.0] for _ in range(count)]

    def run(self, seconds: int, *places: tuple[int, Phase] | None) -> list[str]:
        """Return the warnings while each process is at (step, phase); None for one that does not report."""
        lines = []
        for _ in range(seconds):
            self.now += 1
            reports = {
                i: Report(int(self.now), *place, *self.spent[i]) for i, place in enumerate(places) if place is not None
            }
            self.peers.update({i: peer.report for i, peer in self.peers.seen.items()} | reports, self.now)
            lines += self.peers.late(self.now)
        return lines


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(41, STEP), (41, READ), (41, STEP)], ["process 1 is 10 s behind at step 41 (reading data)"]),
        ([(41, STEP), (40, STEP), (39, LOG)],
            ["process 1 is 10 s behind at step 40 (in the step)", "process 2 is 10 s behind at step 39 (logging)"]),
        # All are in the collective, but one no longer reports.
        ([(41, STEP), None, (41, STEP)],
            ["process 1 has not reported for 6 s, since step 41 (in the step)"]),
        ([(41, STEP), (41, EVALUATE), (41, EVALUATE)], ["process 0 is 10 s behind at step 41 (in the step)"]),
        # Nobody waits.
        ([(41, READ), (41, READ), (41, READ)], []),
        ([(40, COMPILE), (40, COMPILE), (40, COMPILE)], []),
        # A step may take long.
        ([(41, STEP), (41, STEP), (41, STEP)], []),
    ],
)  # fmt: skip
def test_a_process_that_the_others_wait_for_is_named(
    places: list[tuple[int, Phase] | None], expected: list[str]
) -> None:
    clock = Clock(3)
    assert clock.run(1, *[(41, STEP)] * 3) == []
    assert clock.run(1, *places) == []
    lines = clock.run(40, *places)
    assert lines == [f"warning: {line}" for line in expected]
    assert clock.run(5, *[(42, STEP)] * 3) == []


def test_a_process_that_never_reports_is_named() -> None:
    assert Clock(2).run(90, (0, COMPILE), None) == [
        "warning: process 1 has not reported for 60 s, since step 0 (compiling)"
    ]


def test_a_process_that_compiles_silently_is_named_once_others_wait() -> None:
    clock = Clock(2)
    assert clock.run(20, (0, STEP), (0, COMPILE)) == ["warning: process 1 is 10 s behind at step 0 (compiling)"]
    clock = Clock(2)
    assert clock.run(1, (0, COMPILE), (0, COMPILE)) == []
    assert clock.run(30, (0, COMPILE), None) == []
    assert clock.run(1, (0, STEP), None) == ["warning: process 1 has not reported for 31 s, since step 0 (compiling)"]


def test_a_step_that_all_processes_are_in_hangs() -> None:
    clock = Clock(3)
    for step in range(1, 11):
        assert clock.run(2, *[(step, STEP)] * 3) == []
    (line,) = clock.run(90, *[(11, STEP)] * 3)
    assert line.startswith("warning: all 3 processes have been in step 11 for 60 s")


def test_a_straggler_is_slower_than_the_others_over_a_window() -> None:
    clock = Clock(3)
    found = []
    for step in range(1, 31):
        for i, (read_s, log_s) in enumerate(((0.01, 0.02), (0.01, 0.0), (0.01, 0.0))):
            clock.spent[i][0] += 0.5 if i == 2 and step > 10 else read_s
            clock.spent[i][1] += log_s
        assert clock.run(1, *[(step, STEP)] * 3) == []
        found.append(clock.peers.straggler(clock.now))
    assert [i for i, straggler in enumerate(found) if straggler] == [20]
    assert found[20].process == 2
    assert found[20].host_s == pytest.approx(0.5)
    assert found[20].others_s == pytest.approx(0.02)
    assert "process 2 is slow: its host takes 0.5 s a step, mostly reading data" in found[20].message()
