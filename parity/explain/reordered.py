"""Values of two programs that have equal elements in different orders, and are therefore different."""

from collections.abc import Mapping, Set
from typing import Any

from parity.compare.fingerprint import Sources, Trace, is_parameter
from parity.compare.order import LARGEST, comparable, same_order


def in_order(
    ours: Trace[Any], theirs: Trace[Any], same: Mapping[int, Sources], tolerance: float, of_constants: float
) -> dict[int, Sources]:
    """Return those of the counterparts `same` whose elements are not in different orders.

    The elements of a parameter may have another order by design, as in a model that rotates neighbours in place of
    halves, and with them all values on the way to one that is in order again. These counterparts are kept.
    """
    pairs = {(i, j) for i, equal in same.items() for j in equal}

    def is_in_order(i: int, j: int) -> bool:
        value = ours.values[i]
        unit = LARGEST * value.fingerprint.squares**0.5 * (tolerance if value.trained else of_constants)
        return same_order(value.order, theirs.values[j].order, unit)

    known = {pair for pair in pairs if is_in_order(*pair)}
    different = {(i, j) for i, j in pairs if comparable(ours.values[i].order, theirs.values[j].order)} - known
    of_ours, of_theirs = ({pair[side] for pair in known} for side in (0, 1))
    wrong, theirs_wrong = {i for i, _ in different} - of_ours, {j for _, j in different} - of_theirs
    # Of values without axes in common, nothing is known.
    known |= {(i, j) for i, j in pairs if i not in of_ours | wrong and j not in theirs_wrong}
    by_design = _by_design(ours, same.keys() - {i for i, _ in known})
    equal = {i: frozenset(j for j in same[i] if i in by_design or (i, j) in known) for i in same}
    return {i: others for i, others in equal.items() if others}


def _by_design(trace: Trace[Any], reordered: Set[int]) -> set[int]:
    """Those of the values `reordered` that are computed from a parameter among them, or with one."""
    found = {i for i in reordered if is_parameter(trace.values[i])}
    with_them = set[int]()
    for i, value in enumerate(trace.values):
        if not found.isdisjoint(value.given):
            found |= {i} & reordered
            with_them |= value.given & reordered
    return found | with_them
