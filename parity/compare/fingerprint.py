"""The values of a program: a fingerprint of each, and the values it was computed from.

The values of two programs are compared without knowing which belong together. A fingerprint is four numbers that
neither a transpose nor a reshape nor a broadcast changes. Equal values differ only by rounding near 1e-16 of their
root mean square, while a wrong epsilon changes a value by 1e-9 and more.

Values that depend on no parameter, the constants (positions, masks, frequencies, and the batch itself), have
fingerprints too, also as integers and booleans, but those of parameters alone carry a difference to the loss: a
constant without a counterpart is at fault only where a value computed from it is wrong.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from parity.bars import NEGLIGIBLE
from parity.compare.order import Order, is_layout, order, order_of_weights, same_layout
from parity.record import as_pairs

TOLERANCE = 1e-10
"""Relative tolerance of each number, equal to `parity.bars.FIRST_BAR`."""
UNCHANGED = 1e-14
"""Largest relative distance of two fingerprints of one value, summed in different orders."""
ROUNDING = 1e-12
"""Largest distance of the orders of one value in units of its root mean square."""
CONSTANT_TOLERANCE = 1e-12
"""The same as `TOLERANCE` for constants, whose rounding no layer amplifies."""
MASKED = 1e30
"""Larger magnitudes are masked elements: −inf in one framework, the most negative number in the other."""
EXTREMA = ("max", "min")
"""Ends of the names of operations that return one of their elements."""
NOISE = frozenset({-1})
"""Source of values that are no evidence, nor what is computed from them alone: random bits, sums that cancel."""

Where = TypeVar("Where")
Sources = frozenset[int]
"""Indices of the recorded values that a value was computed from; empty for a constant of the program's text."""


class Fingerprint(NamedTuple):
    """Mean of squares, mean of magnitudes, maximum, mean; masked elements and NaN count as zeros."""

    squares: float
    magnitudes: float
    largest: float
    mean: float


def fingerprint(value: np.ndarray) -> Fingerprint:
    """Return the fingerprint of a value, the same for every layout of its numbers and for repetitions of it.

    >>> fingerprint(np.array([[1.0, -2.0], [0.0, 3.0]]))
    Fingerprint(squares=3.5, magnitudes=1.5, largest=3.0, mean=0.5)
    """
    x = np.asarray(as_pairs(value), np.float64).ravel()
    magnitudes, n = np.abs(x), max(x.size, 1)
    if not magnitudes.max(initial=0) < MASKED:  # or a NaN
        x, magnitudes = x[magnitudes < MASKED], magnitudes[magnitudes < MASKED]
    # Not `x @ x`, whose threads wait for each other on a busy machine.
    squares, largest = np.square(x).sum() / n, x.max(initial=-np.inf)
    return Fingerprint(float(squares), float(magnitudes.sum() / n), float(largest), float(x.sum() / n))


def mask_fingerprint(value: np.ndarray) -> Fingerprint | None:
    """Return the fingerprint of a mask, the same whether its elements are booleans, 0 and 1, or 0 and −inf.

    It is that of the rarer kind of element, so that a mask and its negation have the same. None for another value.

    >>> mask_fingerprint(np.array([0, 1, 1, 1])) == mask_fingerprint(np.array([-np.inf, 0, 0, 0]))
    True
    """
    zeros = np.asarray(value) == 0
    others = np.asarray(value)[~zeros]
    if zeros.all() or not zeros.any() or not ((others == 1).all() or (others <= -MASKED).all()):
        return None
    rarer = min(float(zeros.mean()), 1 - float(zeros.mean()))
    return Fingerprint(rarer, rarer, 1.0, rarer)


@dataclass(frozen=True)
class Value(Generic[Where]):
    """A recorded value, its sources and where it was computed; `where` is None for an input of the program.

    Attributes:
      fingerprint: Its numbers.
      sources: What it was computed from.
      where: Where it was computed.
      trained: Whether it depends on a parameter; others are constants.
      extremum: Whether it is a maximum or minimum, which says little of what it was computed from.
      cropped: Of a constant for longer sequences than the batch has, the fingerprint of the part that a batch needs.
      order: The order of its elements.
      given: What it was computed from, as the values in the order in which they were used.
      reordered: Index of the value whose numbers it has, in another order.
    """

    fingerprint: Fingerprint
    sources: Sources
    where: Where | None
    trained: bool = True
    extremum: bool = False
    cropped: Fingerprint | None = None
    order: Order = ()
    given: Sources = frozenset()
    reordered: int | None = None


@dataclass
class Trace(Generic[Where]):
    """The values of a program.

    Attributes:
      values: The values in the order of execution.
      length: Length of the longest sequence of a batch.
      lost: Of a value, where it is used for a result that does not depend on it: zeros, or the numbers of another.
    """

    values: list[Value[Where]] = field(default_factory=list)
    length: int = 0
    lost: dict[int, list[Where]] = field(default_factory=dict)

    def add_input(self, value: np.ndarray) -> Sources:
        """Record a parameter or a buffer, which both programs share, so that it is never at fault."""
        value = as_pairs(value)
        return self._append(Value(fingerprint(value), frozenset(), None, order=order_of_weights(_finite(value))))

    def add_batch(self, value: np.ndarray) -> Sources:
        """Record an array of a batch, which is a constant and never at fault."""
        self.length, value = max(self.length, *value.shape[1:], 0), as_pairs(value)
        return self._append(Value(_of_constant(value), frozenset(), None, trained=False, order=_order_of(value)))

    def add(self, value: np.ndarray, sources: Sources, where: Where | None) -> Sources:
        """Record a value computed from `sources` and return its own sources entry.

        The entry is `sources` again where the value is no evidence: only zeros or ones, integers computed from
        parameters, or the numbers of a source in another layout or repeated. A value that cancels to rounding noise has
        the entry `NOISE`.

        >>> trace = Trace()
        >>> x = trace.add_input(np.array([1.0, 2.0]))
        >>> trace.add(np.array([[2.0, 1.0]]), x, "flip") == trace.add(np.ones(2), x, "ones") == x
        True
        >>> trace.add(np.array([1.0, 4.0]), x, "square") == x
        False
        """
        known, value = sources - NOISE, as_pairs(value)
        trained = any(self.values[i].trained for i in known)
        if not trained and known != sources:
            return NOISE
        if _says_nothing(value) or (trained and not np.issubdtype(value.dtype, np.floating)):
            self._lose(self.computed(known) if not value.any() else (), where)
            return sources
        found = fingerprint(value) if trained else _of_constant(value)
        if not np.isfinite(found.largest):
            return sources
        inputs = {i: self.values[i] for i in known}
        alike = [i for i, x in inputs.items() if x.trained == trained and near(found, x.fingerprint, UNCHANGED)]
        if alike:
            return self._append_layout(alike, known, where, _order_of(value))
        if trained and found.squares <= NEGLIGIBLE**2 * max(given.fingerprint.squares for given in inputs.values()):
            return NOISE
        # The line of a single number is that of its use, or too far from it.
        where = where if trained or value.ndim else None
        extremum = str(getattr(where, "name", where)).rstrip(")").endswith(EXTREMA)
        part = None if trained else self._cropped(value)
        cropped = None if part is None else _of_constant(part)
        in_order = _order_of(value) + (() if part is None else _order_of(part))
        sources = self.computed(known)
        return self._append(Value(found, sources, where, trained, extremum, cropped, in_order, known))

    def _append_layout(self, alike: Sequence[int], known: Sources, where: Where | None, in_order: Order) -> Sources:
        """Record a value with the numbers of the values `alike`, if in none of their layouts."""
        values = {i: self.values[i] for i in alike}
        unit = ROUNDING * values[alike[0]].fingerprint.squares ** 0.5
        layouts = (i for i in alike if is_parameter(values[i]) or same_layout(in_order, values[i].order, unit))
        i = next(layouts, None)
        (computed,) = self.computed({alike[0] if i is None else i})
        self._lose(self.computed(known) - {computed}, where)
        if i is None:
            given = values[alike[0]]
            new = replace(given, sources=frozenset({computed}), given=frozenset(alike[:1]), where=where)
            return self._append(replace(new, order=in_order, reordered=computed))
        if not is_parameter(values[i]) and not is_layout(in_order, values[i].order, unit):
            # Its axes have been split.
            self.values[i] = replace(values[i], order=tuple(dict.fromkeys(values[i].order + in_order)))
        return frozenset({i})

    def computed(self, indices: Iterable[int]) -> Sources:
        """The indices of the values whose numbers some values have."""
        origins = ((i, self.values[i].reordered) for i in indices)
        return frozenset(i if origin is None else origin for i, origin in origins)

    def in_order(self) -> "Trace[Where]":
        """The same, with values in another order among the sources."""
        return replace(self, values=[replace(value, sources=value.given) for value in self.values])

    def _lose(self, values: Iterable[int], where: Where | None) -> None:
        for i in values:
            if where is not None and self.values[i].trained:
                self.lost.setdefault(i, []).append(where)

    def _cropped(self, value: np.ndarray) -> np.ndarray | None:
        if not self.length or max(value.shape, default=0) <= self.length:
            return None
        return value[tuple(slice(self.length) for _ in value.shape)]

    def _append(self, value: Value[Where]) -> Sources:
        self.values.append(value)
        return frozenset({len(self.values) - 1})


def counterparts(
    ours: Trace[Where], theirs: Trace, tolerance: float = TOLERANCE, of_constants: float = CONSTANT_TOLERANCE
) -> list[Sources]:
    """Return, for each value of `ours`, the values of `theirs` equal to it; a constant equals constants only."""
    if not ours.values or not theirs.values:
        return [frozenset()] * len(ours.values)
    rows = [(i, f, v.trained) for i, v in enumerate(theirs.values) for f in (v.fingerprint, v.cropped) if f]
    indices, table, kinds = (np.array(column) for column in zip(*rows, strict=True))

    def equal(value: Value[Where]) -> Sources:
        is_near = np.zeros(len(rows), bool)
        for found in (value.fingerprint, value.cropped):
            if found is not None:
                is_near |= near(found, table, tolerance if value.trained else of_constants)
        return frozenset(indices[is_near & (kinds == value.trained)].tolist())

    with np.errstate(invalid="ignore"):
        return [equal(value) for value in ours.values]


def nearest(value: Value, trace: Trace) -> float:
    """Return the relative distance of a value from the nearest one of a trace."""
    return _nearest(value, _table(trace, value.trained))


def distances(ours: Trace, theirs: Trace, indices: Iterable[int]) -> dict[int, float]:
    """Return the relative distances of values of `ours` from the nearest ones of `theirs`."""
    tables = {trained: _table(theirs, trained) for trained in (True, False)}
    return {i: _nearest(ours.values[i], tables[ours.values[i].trained]) for i in indices}


def _table(trace: Trace, trained: bool) -> np.ndarray:
    return np.array([value.fingerprint for value in trace.values if value.trained == trained]).reshape(-1, 4)


def _nearest(value: Value, table: np.ndarray) -> float:
    return float(_far(value, table).min(initial=np.inf))


def _far(value: Value, table: np.ndarray) -> np.ndarray:
    a = np.asarray(value.fingerprint)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.abs(a - table) / _scale(a, table), nan=0.0).max(-1)


def approximations(value: Value, trace: Trace, within: float) -> list[int]:
    """Return the indices of a trace's values at most a relative distance of `within` from a value, nearest first."""
    kind = [i for i, other in enumerate(trace.values) if other.trained == value.trained]
    far = _far(value, _table(trace, value.trained))
    return [kind[k] for k in np.argsort(far, kind="stable") if far[k] <= within]


def apart(one: Fingerprint, other: Fingerprint, tolerance: float = TOLERANCE) -> bool:
    """Return whether two fingerprints differ by more than rounding.

    >>> apart(fingerprint(np.zeros(3)), fingerprint(np.ones(3)))
    True
    """
    return not near(one, other, tolerance)


def correct(trace: Trace, matched: Iterable[int], forward: Collection[int]) -> set[int]:
    """Return the correct values: those `matched` and, in the forward pass, what these were computed from.

    Other passes are excluded: Adam's first step is nearly the sign of a gradient, which a wrong gradient may share.
    """
    known = set(matched)
    whole = (i for i in known if not trace.values[i].extremum)
    return known | _reached(trace, whole, lambda i: i in forward)


def differing(trace: Trace, right: Collection[int], outputs: Iterable[int]) -> set[int]:
    """Return the values through which a difference reaches `outputs`: they and all after them are wrong.

    >>> trace = Trace()
    >>> x = trace.add_input(np.array([1.0, 2.0]))
    >>> y = trace.add(np.array([3.0, 6.0]), x, "times 3")
    >>> z = trace.add(np.array([4.0, 7.0]), y, "plus 1")
    >>> differing(trace, right=x, outputs=z) == y | z, differing(trace, right=z, outputs=z)
    (True, set())
    """
    return _reached(trace, outputs, lambda i: i not in right and _computed(trace.values[i]) and trace.values[i].trained)


def ancestors(trace: Trace, outputs: Iterable[int]) -> set[int]:
    """Return `outputs` and the values that they were computed from."""
    return _reached(trace, outputs, lambda _: True)


def constants_behind(trace: Trace, right: Collection[int], at: int) -> set[int]:
    """Return the constants without a counterpart that the value `at` was computed from, by way of constants alone."""
    return _reached(
        trace,
        trace.values[at].sources,
        lambda i: i not in right and _computed(trace.values[i]) and not trace.values[i].trained,
    )


def edge(trace: Trace, found: Collection[int]) -> list[int]:
    """Return those of `found` whose sources are all outside of it."""
    return [i for i in found if trace.values[i].sources.isdisjoint(found)]


def _reached(trace: Trace, outputs: Iterable[int], through: Callable[[int], bool]) -> set[int]:
    found: set[int] = set()
    waiting = [*frozenset(outputs) - NOISE]
    while waiting:
        i = waiting.pop()
        if i not in found and through(i):
            found.add(i)
            waiting.extend(trace.values[i].sources)
    return found


def _computed(value: Value) -> bool:
    return value.where is not None


def is_parameter(value: Value) -> bool:
    """Whether a value is a parameter or a buffer that both programs share."""
    return value.trained and not _computed(value)


def _order_of(value: np.ndarray) -> Order:
    """The order of a value; that of a mask is the same for its negation."""
    if mask_fingerprint(value) is None:
        return order(_finite(value))
    zeros = order(np.asarray(value) == 0)
    return (*zeros, *(found._replace(mean=1 - found.mean) for found in zeros))


def _finite(value: np.ndarray) -> np.ndarray:
    x = np.asarray(value, np.float64)
    return x if np.abs(x).max(initial=0) < MASKED else np.where(np.abs(x) < MASKED, x, 0)


def _of_constant(value: np.ndarray) -> Fingerprint:
    return mask_fingerprint(value) or fingerprint(value)


def _says_nothing(value: np.ndarray) -> bool:
    first = value.flat[0] if value.size else 0.0
    return abs(float(first)) in (0.0, 1.0) and bool((value == first).all())


def near(one: Fingerprint, others: "Fingerprint | np.ndarray", tolerance: float = TOLERANCE) -> np.ndarray:
    """Return whether a fingerprint equals each row of others, float64[…, 4].

    >>> near(fingerprint(np.ones(2)), np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0]])).tolist()
    [True, False]
    """
    a, b = np.asarray(one), np.asarray(others)
    return (np.abs(a - b) <= tolerance * _scale(a, b)).all(-1)


def _scale(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The unit of each distance. A maximum and a mean are as exact as the root mean square, not as their own size."""
    scale = np.maximum(np.abs(a), np.abs(b))
    scale[..., 2:] = np.maximum(scale[..., 2:], np.sqrt(a[0]))
    return scale
