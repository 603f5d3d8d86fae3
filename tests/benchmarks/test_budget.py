"""A suite ends within its time limit on any machine: slow work is reduced or skipped, which is reported in one line."""

import contextlib

import pytest

from benchmarks import ceiling, equality, measure, timing
from benchmarks.budget import Budget, OutOfTime, fit_side
from benchmarks.job import Job
from benchmarks.suites import SUITES
from jaxtrain.errors import RunFailed

HOUR = 3600.0


class Clock:
    """A clock that advances only by simulated work."""

    now = 0.0

    def __call__(self):
        return self.now


class FakeWorker(contextlib.nullcontext):
    """A worker whose steps take the given seconds of a clock."""

    def __init__(self, clock, step_s, first_s):
        super().__init__(self)
        self.clock, self.step_s, self.first_s, self.killed = clock, step_s, first_s, False

    def kill(self):
        self.killed = True

    def ask(self, command, timeout):
        assert not self.killed
        kind, *arguments = command.split()
        if kind == "turn":
            self.spend(int(arguments[0]) * self.step_s, timeout)
            return {"wall": [self.step_s] * int(arguments[0]), "cpu": [self.step_s] * int(arguments[0])}
        if kind == "first":
            self.spend(self.first_s, timeout)
            return {"first_s": self.first_s, "note": ""}
        self.spend(2 * self.step_s, timeout)
        return {"step_s": self.step_s, "device": "cpu", "compile_s": 1.0, "warm_compile_s": 1.0, "flops": None}

    def finish(self, timeout):
        self.spend(0.0, timeout)
        return {"peak_bytes": 1}

    def spend(self, seconds, timeout):
        self.clock.now += min(seconds, timeout)
        if seconds > timeout:
            raise OutOfTime


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run(clock, monkeypatch):
    """Measure a suite with workers whose step takes `seconds(job)`, and equality checks that take `check_s`."""

    def run(suite, seconds, check_s=10.0):
        def verify(jobs, budget, report):
            clock.now += min(check_s, budget.remaining())
            if check_s > budget.remaining():
                report(f"skipped {jobs[0].workload}")
                return False
            return True

        monkeypatch.setattr(equality, "verify", verify)
        monkeypatch.setattr(timing, "start_worker", lambda job: FakeWorker(clock, seconds(job), seconds(job)))
        notes = []
        results = measure.measure(suite, Budget(600, clock), lambda _: None, notes.append, lambda _: None)
        assert results.notes == notes
        return results

    return run


def test_a_job_over_the_limit_is_skipped_with_a_note_and_the_others_are_measured(run, clock):
    def seconds(job):
        return 60.0 if job.precision == "bf16" and job.engine == "torch_eager" else 0.02

    results = run(SUITES["cpu"], seconds)
    assert clock.now < 600
    ceilings = [t for group in results.groups for t in group.ceilings]
    slow = [t for t in results.timings + ceilings if seconds(t.job) > 1]
    assert not slow
    assert len(results.timings) == sum(map(len, SUITES["cpu"].groups)) - 2
    assert all(len(t.wall) == 5 * SUITES["cpu"].rounds for t in results.timings)
    assert [line for line in results.notes if "gpt2-tiny" in line] == [
        "skipped gpt2-tiny by torch_eager in bf16: its first step took 60.0 s; for more time use --minutes"
    ]
    assert len(results.notes) == 3  # product, gpt2-tiny, mlp-launch-bound
    # Each group has the ceilings of its own rounds: both copies, and the products of its precision that fit.
    by_group = [{(t.job.workload, t.job.engine, t.job.precision) for t in group.ceilings} for group in results.groups]
    copies = {("copy", engine, "fp32") for engine in ("jax", "torch_eager")}
    in_fp32 = {("product", engine, "fp32") for engine in ("jax", "torch_eager")}
    assert by_group == [copies | found for found in (in_fp32, {("product", "jax", "bf16")}) * 2] + [copies | in_fp32]
    assert all(len(t.turns) == SUITES["cpu"].rounds for t in ceilings)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_ends_in_time_if_no_job_finishes(run, clock, name):
    results = run(SUITES[name], lambda job: HOUR)
    assert clock.now <= 600
    assert not results.timings
    assert all(line.startswith("skipped ") for line in results.notes)
    assert len(results.notes) >= sum(map(len, SUITES[name].groups))


def test_a_workload_whose_check_does_not_end_is_not_timed(run, clock):
    results = run(SUITES["cpu"], lambda job: 0.02, check_s=HOUR)
    assert clock.now <= 600
    assert not results.timings
    assert len([line for line in results.notes if line.startswith("skipped")]) == 3


def test_rounds_are_reduced_to_meet_the_limit(run, clock):
    results = run(SUITES["cpu"], lambda job: 2.0)
    assert clock.now <= 600
    assert len(results.timings) == sum(map(len, SUITES["cpu"].groups))
    assert all(5 <= len(t.wall) < 5 * SUITES["cpu"].rounds for t in results.timings)
    assert any("rounds, for the time limit" in line for line in results.notes)


def test_a_hanging_turn_skips_only_its_job(clock, monkeypatch):
    jobs = [Job("gpt2-tiny", "jax"), Job("gpt2-tiny", "torch_eager")]
    workers = {job.engine: FakeWorker(clock, 0.1, 0.1) for job in jobs}
    monkeypatch.setattr(timing, "start_worker", lambda job: workers[job.engine])
    notes = []

    def ask(command, timeout):
        if command.startswith("turn"):
            workers["jax"].spend(HOUR, timeout)
        return FakeWorker.ask(workers["jax"], command, timeout)

    workers["jax"].ask = ask
    (found,) = timing.time_jobs(jobs, 4, Budget(100, clock), notes.append)
    assert found.job.engine == "torch_eager"
    assert len(found.wall) == 20
    assert (workers["jax"].killed, workers["torch_eager"].killed) == (True, False)
    assert notes == ["skipped gpt2-tiny by jax in fp32: a turn did not end in time; for more time use --minutes"]


@pytest.mark.parametrize(("step_s", "first_s"), [(0.1, HOUR), (0.1, 60.0), (HOUR, 0.1), (10.0, 10.0)])
def test_a_skipped_job_is_killed_before_the_others_are_timed(clock, monkeypatch, step_s, first_s):
    jobs = [Job("gpt2-tiny", "torch_eager"), Job("gpt2-tiny", "jax")]
    workers = {"torch_eager": FakeWorker(clock, step_s, first_s), "jax": FakeWorker(clock, 0.1, 0.1)}
    monkeypatch.setattr(timing, "start_worker", lambda job: workers[job.engine])

    def ask(command, timeout):
        assert workers["torch_eager"].killed or not command.startswith("turn")
        return FakeWorker.ask(workers["jax"], command, timeout)

    workers["jax"].ask = ask
    (found,) = timing.time_jobs(jobs, 4, Budget(100, clock), print)
    assert found.job.engine == "jax"
    assert workers["torch_eager"].killed


@pytest.mark.parametrize(("flop_rate", "side"), [(1e12, 2048), (5e9, 512), (1e9, 256), (1.0, 128)])
def test_the_product_is_reduced_on_slow_machines(clock, flop_rate, side):
    def product(n):
        def call():
            clock.now += 2 * n**3 / flop_rate

        return call

    engine = ceiling._product_engine(Job("product", "torch_eager", "bf16"), product, 2048, "cpu", clock)
    assert engine.flops == 2 * side**3
    reduced = f"matrix product by torch_eager in bf16: reduced from 2048x2048 to {side}x{side}"
    assert engine.note == ("" if side == 2048 else reduced)
    if flop_rate > 1:
        assert engine.flops / flop_rate <= ceiling.CALL_LIMIT_S


def test_a_slow_product_is_never_tried_at_full_size():
    tried = []
    fit_side(lambda side: tried.append(side) or 2 * side**3 / 1e8, 2048, 1.0)
    assert max(tried) == 256


def test_shares_of_a_budget_add_up_to_the_budget(clock):
    budget = Budget(600, clock)
    for parts in range(16, 0, -1):
        share = budget.share(parts).remaining()
        assert share + 1e-9 > 600 / 16 or parts < 16
        clock.now += share
    assert clock.now == pytest.approx(600)
    assert budget.remaining() == pytest.approx(0)


def test_a_process_that_does_not_answer_times_out():
    with timing.Process("silent", "-c", "import time; time.sleep(60)") as process, pytest.raises(OutOfTime):
        process.receive(0.01)


def test_a_failed_process_is_reported_with_its_last_line_of_output():
    code = "raise ValueError('no device')"
    with (
        timing.Process("broken", "-S", "-c", code) as process,
        pytest.raises(RunFailed, match=r"^broken: ValueError: no device$"),
    ):
        process.ask("turn 1 0", 60.0)


def test_only_json_lines_are_answers():
    code = "print('noise'); print('{\"a\": 1}'); print('{\"b\": 2}'); input(); print('{\"c\": 3}')"
    with timing.Process("talker", "-S", "-c", code) as process:
        assert process.receive(60.0) == {"a": 1}
        assert process.receive(60.0) == {"b": 2}
        assert process.ask("", 60.0) == {"c": 3}
