"""Which tests run: quick cases of promises, laws and what a change touches, within a time."""

from types import SimpleNamespace
from typing import Any

import hypothesis.core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import CHANGE_SECONDS, QUICK_SECONDS, SEPARATE, SHORT, Choice, function_of, laws, promises
from tests.touched import distances

NEVER_MEASURED = "tests/a.py::test_a[never measured]"
LONG_LAWS = [f"tests/d.py::test_long_{i}" for i in range(6)]
OTHERS = {"first": ["tests/a.py::test_a", "tests/a.py::test_b"], "second": ["tests/b.py::test_slow"]}
PROMISES = {**OTHERS, "third": ["tests/a.py::test_a", *LONG_LAWS]}
SECONDS = {
    **{f"tests/a.py::test_a[{i}]": 1.0 + i for i in range(8)},
    "tests/b.py::test_slow": 99.0,
    **dict.fromkeys(LONG_LAWS, 11.0),
    **{f"tests/c.py::test_other[{i}]": 7.0 for i in range(200)},
}
NAMES = [NEVER_MEASURED, *SECONDS, *(f"tests/a.py::test_b[{i}]" for i in range(4))]


def chosen(tier: str, seed: str = "0", **arguments: Any) -> set[str]:
    items: Any = [SimpleNamespace(nodeid=name) for name in NAMES]
    return {item.nodeid for item in getattr(Choice(items, {**SECONDS, NEVER_MEASURED: None}, seed), tier)(**arguments)}


def test_a_quick_run_has_a_quick_case_of_each_promise_within_its_time() -> None:
    found = chosen("quick", of_promises=PROMISES)
    assert "tests/b.py::test_slow" in found
    assert {function_of(name) for name in found} == {test for tests in OTHERS.values() for test in tests}
    assert sum(SECONDS.get(name, SHORT / 3) for name in found) <= QUICK_SECONDS


def test_a_change_runs_promises_short_laws_the_nearest_tests_and_longer_laws_in_turn() -> None:
    near = {"tests/c.py": 1, "jaxtrain/c.py": 0}
    found = chosen("change", of_promises=PROMISES, nearness=near)
    assert {function_of(name) for name in found} >= {test for tests in PROMISES.values() for test in tests}
    assert any(name.startswith("tests/c.py") for name in found)
    assert not any(name.startswith("tests/c.py") for name in chosen("change", of_promises=PROMISES, nearness={}))
    assert sum(SECONDS.get(name, SHORT / 3) for name in found) <= CHANGE_SECONDS
    many = {f"tests/e.py::test_long_{i}": 90.0 for i in range(12)}
    seconds = {**SECONDS, NEVER_MEASURED: None, **many}
    items: Any = [SimpleNamespace(nodeid=name) for name in seconds]
    named = {**PROMISES, "fourth": [*many]}
    runs = [{x.nodeid for x in Choice(items, seconds, str(i)).change(named, {})} for i in range(20)]
    assert all(0 < len(run & many.keys()) < len(many) for run in runs)
    assert set().union(*runs) >= many.keys()
    assert all(
        function_of("tests/a.py::test_a") in map(function_of, run) and "tests/b.py::test_slow" in run for run in runs
    )


def test_the_cases_move_with_the_commit_until_all_were_seen() -> None:
    seen = [chosen("directory", seed=str(i), seconds=600.0) for i in range(40)]
    assert len(set(map(frozenset, seen))) > 30
    assert set().union(*seen) == {*NAMES} - {NEVER_MEASURED}


def test_a_promise_names_tests_or_all_of_a_file() -> None:
    named = {"first": ["tests/a.py"], "second": ["tests/b.py::test_slow", "tests/c.py"]}
    found = laws(named, map(function_of, NAMES))
    assert found["first"] == ["tests/a.py::test_a", "tests/a.py::test_b"]
    assert found["second"] == ["tests/b.py::test_slow", "tests/c.py::test_other"]


def test_a_changed_file_is_nearest_to_those_that_import_what_it_defines() -> None:
    found = distances({"jaxtrain/step/update/clip.py"})
    assert found["jaxtrain/step/update/clip.py"] == 0
    assert found["tests/step/test_clip.py"] < found["tests/cli/test_train.py"]
    assert "tests/observe/test_charts.py" not in found


def test_every_promise_runs_in_continuous_integration(request: pytest.FixtureRequest) -> None:
    """This test is a law itself."""
    if request.config.option.tier not in ("quick", "change"):
        pytest.skip("tests were selected in the place of a tier")
    run = {function_of(item.nodeid) for item in request.session.items}
    missing = [
        promise
        for promise, tests in laws(promises(), run).items()
        if run.isdisjoint(tests) and not all(test.startswith(SEPARATE) for test in promises()[promise])
    ]
    assert not missing, missing


def test_examples_of_hypothesis_are_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int) -> list[int]:
        found = []

        @settings(max_examples=20, database=None)
        @given(st.integers())
        def draw(x: int) -> None:
            found.append(x)

        monkeypatch.setattr(hypothesis.core, "global_force_seed", seed)
        draw()
        return found

    assert drawn(1) == drawn(1) != drawn(2)
