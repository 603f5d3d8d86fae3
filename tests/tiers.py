"""A pytest plugin that chooses which tests run.

A law is a test that a promise of docs/guarantees.md names, by itself or with all tests of its file; its cases have the
mark `law`. There are three tiers:

- quick, of `pytest` alone: a quick case of each promise, and of as many laws as its time holds;
- change, of continuous integration: a quick case of each promise and of each law of up to two seconds, the tests that
  are nearest to the last commits' changes by the graph of imports, and as many of the longer laws as its time holds;
- all: everything, for a nightly run.

Which cases of a test they are, and which examples hypothesis draws, depends on the commit, so that all are seen within
days. Paths, `-k` and `-m` select tests in the place of a tier: of directories a case of each test, and as many as the
time holds; of files, all. `pytest -m law tests/step` runs the laws of an area in about a minute.
`durations.json` has the seconds of cases of half a second or more, on one slow core with an empty compilation cache;
`--record` adds those of a run. Those without a number were never measured, and no tier but `all` chooses them. Tests
marked `nightly` take minutes or a machine to themselves: `--tier all` runs them, as do `-m nightly` and their own
names.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.core
import pytest

from tests.touched import distances, git, in_last_commits

ROOT = Path(__file__).parents[1]
GUARANTEES, DURATIONS = ROOT / "docs" / "guarantees.md", ROOT / "tests" / "durations.json"
QUICK_SECONDS, CHANGE_SECONDS, DIRECTORY_SECONDS = 150.0, 750.0, 600.0
"""Of all workers together, as durations.json counts them."""
TOUCHED_SECONDS, LAW_SECONDS = 150.0, 100.0
LONGEST_QUICK = 5.0
"""Seconds of the longest case that the quick tier runs, unless it is the only one of a promise."""
LONGEST_CHANGE = 2.0
"""Seconds of the longest case that the change tier runs in every commit, unless it is the only one of a promise."""
LONG = 10.0
"""Seconds of a case that runs before shorter ones."""
SHORT = 0.5
"""Seconds from which durations are recorded. A case without one counts as a third of it."""
TIERS = ("quick", "change", "all")
SEPARATE = ("tests/foreign/", "tests/gpu_programs/", "tests/trl/")
"""Folders of tests that need other packages than the others, and run by themselves."""


@cache
def promises() -> dict[str, list[str]]:
    """Return what each promise of docs/guarantees.md names: "tests/a.py::test_b", or "tests/a.py" for all its tests."""
    found: dict[str, list[str]] = defaultdict(list)
    promise = ""
    for line in GUARANTEES.read_text().splitlines():
        if line.startswith("**"):
            promise = line
        elif row := re.match(r"\| `(tests/[\w/]+\.py(?:::\w+)?)` \|", line):
            found[promise].append(row[1])
    return dict(found)


def laws(of_promises: Mapping[str, Sequence[str]], functions: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests of each promise.

    Args:
      of_promises: What each promise names.
      functions: The tests that there are.
    """
    of_files = defaultdict(list)
    for function in dict.fromkeys(functions):
        of_files[file_of(function)].append(function)
    return {
        promise: [test for name in names for test in ([name] if "::" in name else of_files[name])]
        for promise, names in of_promises.items()
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tiers."""
    parser.addoption("--tier", choices=TIERS, help="the tests that run: see tests/tiers.py")
    parser.addoption("--record", action="store_true", help="write the tests' durations to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier: the quick one for a call without paths and expressions."""
    if worker := getattr(config, "workerinput", None):
        config.option.tier, config.stash[NAMED] = worker["tier"]
        _seed_examples(config)
        return
    of_testpaths = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.option.tier is None and of_testpaths and not (config.option.keyword or config.option.markexpr):
        config.option.tier = "quick"
    config.stash[NAMED] = not of_testpaths and all("::" in arg or arg.endswith(".py") for arg in config.args)
    _seed_examples(config)
    if config.option.record:
        config.pluginmanager.register(Recorder())


def _seed_examples(config: pytest.Config) -> None:
    """Have hypothesis draw the examples of the commit, which a run of the same commit repeats."""
    if config.option.tier in ("quick", "change") and hypothesis.core.global_force_seed is None:
        hypothesis.core.global_force_seed = int(git("rev-parse", "HEAD") or "0", 16)


NAMED = pytest.StashKey[bool]()
"""Whether files or tests were named, rather than directories."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker the tier, since the arguments of its own call differ."""
    node.workerinput["tier"] = (node.config.option.tier, node.config.stash[NAMED])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file in the quick tier that has no law."""
    if config.option.tier != "quick" or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(ROOT).as_posix()
    return not any(file_of(name) == path for names in promises().values() for name in names) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the laws, and deselect what the tier leaves out."""
    of_promises, seconds = laws(promises(), (function_of(item.nodeid) for item in items)), recorded()
    every = {test for tests in of_promises.values() for test in tests}
    for item in items:
        if function_of(item.nodeid) in every:
            item.add_marker(pytest.mark.law)
    kept = {item.nodeid for item in _chosen(config, items, of_promises, seconds)}
    deselected = [item for item in items if item.nodeid not in kept]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    # Long ones first: at the end one worker would wait for the other.
    items[:] = sorted((x for x in items if x.nodeid in kept), key=lambda x: (seconds.get(x.nodeid) or 0.0) < LONG)


def _chosen(
    config: pytest.Config,
    items: Sequence[pytest.Item],
    of_promises: Mapping[str, Sequence[str]],
    seconds: Mapping[str, float | None],
) -> Iterable[pytest.Item]:
    tier, named = config.option.tier, config.stash[NAMED]
    if tier == "all" or "nightly" in config.option.markexpr or any("::" in arg for arg in config.args):
        return items
    items = [item for item in items if not item.get_closest_marker("nightly")]
    of_laws = config.option.markexpr == "law" and not named
    if of_laws:
        items = [item for item in items if item.get_closest_marker("law")]
    choice = Choice(items, seconds, git("rev-parse", "HEAD"))
    if tier == "quick":
        return choice.quick(of_promises)
    if tier == "change":
        return choice.change(of_promises, distances(in_last_commits()))
    if of_laws:
        return choice.directory(LAW_SECONDS)
    return items if named or config.option.keyword or config.option.markexpr else choice.directory(DIRECTORY_SECONDS)


class Choice:
    """Cases of tests, chosen by how long they take and by a seed."""

    def __init__(self, items: Sequence[pytest.Item], durations: Mapping[str, float | None], seed: str) -> None:
        self._seed = seed
        self._cases: dict[str, list[pytest.Item]] = defaultdict(list)
        self._seconds: dict[str, float] = {}
        for item in items:
            seconds = durations.get(item.nodeid, SHORT / 3)
            if seconds is not None:
                self._cases[function_of(item.nodeid)].append(item)
                self._seconds[item.nodeid] = seconds

    def quick(self, of_promises: Mapping[str, Sequence[str]]) -> list[pytest.Item]:
        """Return a case of each promise, and of other laws."""
        laws = self._laws(of_promises)
        others = [item for item in self._in_order(laws.values()) if self._seconds[item.nodeid] <= LONGEST_QUICK]
        return self._within(QUICK_SECONDS, self._promised(of_promises, laws), others)

    def change(self, of_promises: Mapping[str, Sequence[str]], nearness: Mapping[str, int]) -> list[pytest.Item]:
        """Return a quick case of each promise and short law, the tests nearest to a change, and longer laws."""
        laws = self._laws(of_promises)
        short = [item for item in laws.values() if self._seconds[item.nodeid] <= LONGEST_CHANGE]
        needed = list({item.nodeid: item for item in (*self._promised(of_promises, laws), *short)}.values())
        near = [item for cases in self._cases.values() for item in cases if file_of(item.nodeid) in nearness]
        near = sorted(self._in_order(near), key=lambda item: nearness[file_of(item.nodeid)])
        left = CHANGE_SECONDS - sum(self._seconds[item.nodeid] for item in needed)
        touched = self._within(min(TOUCHED_SECONDS, left), (), near)
        longer = self._in_order(laws.values())
        others = self._in_order(item for test in laws for item in self._cases[test])
        return self._within(CHANGE_SECONDS, [*needed, *touched], [*longer, *others])

    def directory(self, seconds: float) -> list[pytest.Item]:
        """Return a case of each test, and further ones while the seconds hold them."""
        needed = [self._quick(cases) for cases in self._cases.values()]
        others = self._in_order(item for cases in self._cases.values() for item in cases)
        return self._within(seconds, [x for x in needed if x is not None], others)

    def _promised(self, of_promises: Mapping[str, Sequence[str]], laws: Mapping[str, pytest.Item]) -> list[pytest.Item]:
        """Return a quick case of each promise."""
        found = [self._quick([laws[test] for test in tests if test in laws]) for tests in of_promises.values()]
        return [item for item in found if item is not None]

    def _laws(self, of_promises: Mapping[str, Sequence[str]]) -> dict[str, pytest.Item]:
        """Return a quick case of each law, by the test's name."""
        tests = dict.fromkeys(test for tests in of_promises.values() for test in tests)
        return {test: item for test in tests if (item := self._quick(self._cases.get(test, ()))) is not None}

    def _quick(self, cases: Sequence[pytest.Item]) -> pytest.Item | None:
        """Return one of the cases that take little longer than the quickest."""
        if not cases:
            return None
        bound = max(1.0, 1.5 * min(self._seconds[item.nodeid] for item in cases))
        return self._in_order(item for item in cases if self._seconds[item.nodeid] <= bound)[0]

    def _in_order(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        return sorted(items, key=lambda item: hashlib.sha256((self._seed + item.nodeid).encode()).digest())

    def _within(
        self, seconds: float, needed: Sequence[pytest.Item], others: Iterable[pytest.Item]
    ) -> list[pytest.Item]:
        """Return all needed items, and others in their order while the sum of their seconds holds them."""
        found = {item.nodeid: item for item in needed}
        left = seconds - sum(self._seconds[name] for name in found)
        for item in others:
            if item.nodeid not in found and self._seconds[item.nodeid] <= left:
                found[item.nodeid] = item
                left -= self._seconds[item.nodeid]
        return list(found.values())


def function_of(nodeid: str) -> str:
    """Return the name of a test without its case: "tests/a.py::test_b" of "tests/a.py::test_b[c]"."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    """Return the file of a test, relative to the repository."""
    return nodeid.partition("::")[0]


def recorded() -> dict[str, float | None]:
    """Return the seconds of cases by their names; None of cases that are to be measured before a tier chooses them."""
    files = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return {f"{file}::{case}": seconds for file, cases in files.items() for case, seconds in cases.items()}


class Recorder:
    """Records how long the tests of a session take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the durations, those of other tests as they were."""
        write(recorded(), self._seconds)


def write(before: Mapping[str, float | None], measured: Mapping[str, float]) -> None:
    """Write durations: measured ones, and those before of cases that were not measured."""
    seconds = {case: x for case, x in before.items() if case not in measured}
    seconds |= {case: round(x, 1) for case, x in measured.items() if x >= SHORT}
    files: dict[str, dict[str, float | None]] = defaultdict(dict)
    for case in sorted(seconds):
        file, _, name = case.partition("::")
        if (ROOT / file).exists():
            files[file][name] = seconds[case]
    DURATIONS.write_text(json.dumps(files, indent=0, sort_keys=True) + "\n")
