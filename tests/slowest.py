"""The tests that take longest, to be run with `-m slow`: those of `tests/slowest.txt`.

`pytest -m 'not nightly' --durations=0 --durations-min=0.1 | python -m tests.slowest 1000` writes that list anew, of a
run with an empty cache: the longest tests, until what is left takes 1000 seconds of one core. The shortest of each file
stays. A fixture's seconds are those of the test that it was first made for.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")


def listed() -> frozenset[str]:
    """The ids of the tests."""
    return frozenset(LIST.read_text().splitlines())


def longest(lines: Iterable[str], left: float) -> list[str]:
    """The ids of the longest tests of what pytest printed of durations, until no more than `left` seconds remain.

    >>> longest(["3.00s call a.py::f", "2.00s setup a.py::f", "1.00s call a.py::g", "4.00s call b.py::h"], left=6)
    ['a.py::f']
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in lines:
        if found := re.match(r"(\d+\.\d+)s (?:call|setup|teardown) +(\S.*)", line.strip()):
            seconds[found[2].strip()] += float(found[1])
    kept = {min(of_file, key=lambda t: seconds[t]) for of_file in _by_file(seconds).values()}
    total, found = sum(seconds.values()), []
    for test in sorted(seconds.keys() - kept, key=lambda t: -seconds[t]):
        if total <= left:
            break
        found.append(test)
        total -= seconds[test]
    return sorted(found)


def _by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    files = defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)
    return files


if __name__ == "__main__":
    LIST.write_text("".join(f"{test}\n" for test in longest(sys.stdin, float(sys.argv[1]))))
