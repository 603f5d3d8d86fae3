"""The values of a program: a fingerprint of each, and the values it was computed from.

The values of two programs are compared without knowing which belong together. A fingerprint is four numbers that
neither a transpose nor a reshape changes. The terms of its sums have one sign, so equal values differ only by rounding
near 1e-16, while a wrong epsilon changes a value by 1e-9 and more.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from parity.bars import NEGLIGIBLE

TOLERANCE = 1e-10
"""Relative tolerance of each number, equal to `parity.bars.FIRST_BAR`."""
UNCHANGED = 1e-14
"""Largest relative distance of two fingerprints of one value, summed in different orders."""
MASKED = 1e30
"""Larger magnitudes are masked elements: −inf in one framework, the most negative number in the other."""

Where = TypeVar("Where")
Sources = frozenset[int]
"""Indices of the recorded values that a value was computed from; empty for a constant."""


class Fingerprint(NamedTuple):
    """Number of elements, sum of squares, sum of magnitudes, maximum; masked elements and NaN are only counted."""

    elements: float
    squares: float
    magnitudes: float
    largest: float


def fingerprint(value: np.ndarray) -> Fingerprint:
    """Return the fingerprint of a value, the same for every layout of its numbers.

    >>> fingerprint(np.array([[1.0, -2.0], [0.0, 3.0]]))
    Fingerprint(elements=4, squares=14.0, magnitudes=6.0, largest=3.0)
    """
    x = np.asarray(value, np.float64).ravel()
    magnitudes = np.abs(x)
    if not magnitudes.max(initial=0) < MASKED:  # or a NaN
        x, magnitudes = x[magnitudes < MASKED], magnitudes[magnitudes < MASKED]
    # Not `x @ x`, whose threads wait for each other on a busy machine.
    squares, largest = np.square(x).sum(), x.max(initial=-np.inf)
    return Fingerprint(np.size(value), float(squares), float(magnitudes.sum()), float(largest))


@dataclass(frozen=True)
class Value(Generic[Where]):
    """A recorded value, its sources and where it was computed; `where` is None for an input of the program."""

    fingerprint: Fingerprint
    sources: Sources
    where: Where | None


@dataclass
class Trace(Generic[Where]):
    """The values of a program in the order of execution."""

    values: list[Value[Where]] = field(default_factory=list)

    def add_input(self, value: np.ndarray) -> Sources:
        """Record an input, which both programs share, so that it is never at fault."""
        return self._append(fingerprint(value), frozenset(), None)

    def add(self, value: np.ndarray, sources: Sources, where: Where) -> Sources:
        """Record a value computed from `sources` and return its own sources entry.

        The entry is `sources` again where the value is no evidence: only zeros or ones, or the numbers of an input in
        another layout or repeated. A value that cancels to rounding noise counts as a constant, without sources.

        >>> trace = Trace()
        >>> x = trace.add_input(np.array([1.0, 2.0]))
        >>> trace.add(np.array([[2.0, 1.0]]), x, "flip") == trace.add(np.ones(2), x, "ones") == x
        True
        >>> trace.add(np.array([1.0, 4.0]), x, "square") == x
        False
        """
        if not sources:
            return sources
        found = fingerprint(value)
        if not np.isfinite(found.largest) or _says_nothing(value):
            return sources
        inputs = [self.values[i].fingerprint for i in sources]
        for i, given in zip(sources, inputs, strict=True):
            times = found.elements / given.elements if given.elements else 0.0
            if times >= 1 and times.is_integer() and _near(found, _repeated(given, times), UNCHANGED):
                return frozenset({i})
        if _mean_square(found) <= NEGLIGIBLE**2 * max(map(_mean_square, inputs)):
            return frozenset()
        return self._append(found, sources, where)

    def _append(self, found: Fingerprint, sources: Sources, where: Where | None) -> Sources:
        self.values.append(Value(found, sources, where))
        return frozenset({len(self.values) - 1})


def counterparts(ours: Trace[Where], theirs: Trace) -> list[Sources]:
    """Return, for each value of `ours`, the values of `theirs` equal to it."""
    if not ours.values or not theirs.values:
        return [frozenset()] * len(ours.values)
    table = np.array([value.fingerprint for value in theirs.values])
    with np.errstate(invalid="ignore"):
        return [frozenset(np.flatnonzero(_near(v.fingerprint, table, TOLERANCE)).tolist()) for v in ours.values]


def correct(trace: Trace, matched: Iterable[int], forward: Collection[int]) -> set[int]:
    """Return the correct values: those `matched` and, in the forward pass, what these were computed from.

    Other passes are excluded: Adam's first step is nearly the sign of a gradient, which a wrong gradient may share.
    """
    known = set(matched)
    return known | _reached(trace, known, lambda i: i in forward)


def differing(trace: Trace, right: Collection[int], outputs: Iterable[int]) -> set[int]:
    """Return the values through which a difference reaches `outputs`: they and all after them are wrong.

    >>> trace = Trace()
    >>> x = trace.add_input(np.array([1.0, 2.0]))
    >>> y = trace.add(np.array([3.0, 6.0]), x, "times 3")
    >>> z = trace.add(np.array([4.0, 7.0]), y, "plus 1")
    >>> differing(trace, right=x, outputs=z) == y | z, differing(trace, right=z, outputs=z)
    (True, set())
    """
    return _reached(trace, outputs, lambda i: i not in right and trace.values[i].where is not None)


def edge(trace: Trace, found: Collection[int]) -> list[int]:
    """Return those of `found` whose sources are all outside of it."""
    return [i for i in found if trace.values[i].sources.isdisjoint(found)]


def _reached(trace: Trace, outputs: Iterable[int], through: Callable[[int], bool]) -> set[int]:
    found: set[int] = set()
    waiting = list(outputs)
    while waiting:
        i = waiting.pop()
        if i not in found and through(i):
            found.add(i)
            waiting.extend(trace.values[i].sources)
    return found


def _says_nothing(value: np.ndarray) -> bool:
    first = value.flat[0] if value.size else 0.0
    return abs(float(first)) in (0.0, 1.0) and bool((value == first).all())


def _repeated(given: Fingerprint, times: float) -> Fingerprint:
    return Fingerprint(given.elements * times, given.squares * times, given.magnitudes * times, given.largest)


def _mean_square(found: Fingerprint) -> float:
    return found.squares / found.elements if found.elements else 0.0


def _near(one: Fingerprint, others: "Fingerprint | np.ndarray", tolerance: float) -> np.ndarray:
    """Whether `one` equals each row of `others`. A maximum is as exact as the numbers around it, not as its own
    size."""
    a, b = np.asarray(one), np.asarray(others)
    scale = np.maximum(np.abs(a), np.abs(b))
    scale[..., 3] = np.maximum(scale[..., 3], np.sqrt(a[1] / max(a[0], 1)))
    return (np.abs(a - b) <= tolerance * scale).all(-1)
