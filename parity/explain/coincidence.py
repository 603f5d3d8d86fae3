"""Values of two programs that are equal by chance, and no evidence that what they were computed from is.

A function of a value may hardly depend on it: the softmax of small scores is nearly uniform, whatever they are, and a
normalized value does not depend on its scale. If the scores are wrong by a thousandth, the fingerprint of their softmax
is equal within the tolerance. Such a match is recognized by two signs: its distance is far above rounding and above
what the values before it have, and what is computed from it differs again.
"""

from collections.abc import Collection, Mapping
from typing import Any

from parity.compare.fingerprint import Sources, Trace, distances

ROUNDING = 1e-13
"""Largest relative distance of equal values that float64 rounds in different ways."""
AMPLIFIED = 10
"""Factor by which a function may amplify the distance of its arguments."""
ROUNDED = 1e-6
"""Largest relative distance of a constant that is rounded to float32 on one side."""


def by_chance(ours: Trace[Any], theirs: Trace[Any], same: Mapping[int, Sources], forward: Collection[int]) -> set[int]:
    """Return the values of `ours` that are equal to values of `theirs` by chance.

    Args:
      ours: The values of a program.
      theirs: Those of the other.
      same: Indices of the values of `ours` with a counterpart, and of their counterparts.
      forward: Indices of the values of the forward pass of `ours`.

    Returns:
      Their indices.
    """
    users = _users(ours, forward)
    found: set[int] = set()
    while True:
        known = same.keys() - found
        before = {i: _before(ours, i, known, forward) for i in known if _resumes(ours, i, known, forward)}
        apart = distances(ours, theirs, set(before).union(*before.values()))
        new = {
            i
            for i, values in before.items()
            if apart[i] > max(ROUNDING, AMPLIFIED * max((apart[j] for j in values if apart[j] <= ROUNDED), default=0.0))
            and _mostly_wrong(users, i, known)
        }
        if not new:
            return found
        found |= new


def _resumes(trace: Trace[Any], i: int, known: Collection[int], forward: Collection[int]) -> bool:
    """Whether a value of the forward pass with a counterpart is computed from one without."""
    return i in forward and any(
        j in forward and j not in known and trace.values[j].trained for j in trace.values[i].sources
    )


def _before(trace: Trace[Any], i: int, known: Collection[int], forward: Collection[int]) -> set[int]:
    """The last values with a counterpart before `i`, and the constants that have none."""
    found: set[int] = set()
    seen: set[int] = set()
    waiting = [*trace.values[i].sources]
    while waiting:
        j = waiting.pop()
        if j in seen or j not in forward:
            continue
        seen.add(j)
        if j in known or not trace.values[j].trained:
            found.add(j)
        else:
            waiting.extend(trace.values[j].sources)
    return found


def _users(trace: Trace[Any], forward: Collection[int]) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for i in sorted(i for i in forward if trace.values[i].reordered is None):
        for j in trace.values[i].sources:
            users.setdefault(j, []).append(i)
    return users


def _mostly_wrong(users: Mapping[int, list[int]], i: int, known: Collection[int]) -> bool:
    """Whether most of the values computed from `i` have no counterpart."""
    after: set[int] = set()
    waiting = [i]
    while waiting:
        for j in users.get(waiting.pop(), ()):
            if j not in after:
                after.add(j)
                waiting.append(j)
    return 2 * sum(j in known for j in after) < len(after)
