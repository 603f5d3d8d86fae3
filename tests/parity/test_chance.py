"""A match of values that hardly depend on what they are computed from is no evidence."""

from typing import Any

import numpy as np
import pytest

from parity.compare.fingerprint import Trace, counterparts
from parity.explain.coincidence import by_chance

SCORES, WEIGHTS, OUT = np.random.default_rng(0).standard_normal((3, 4, 8)) + 2


def attended(scores: float, softmax: float, out: float) -> Trace[Any]:
    """The values of an attention, each off by a factor; the softmax hardly depends on the scores."""
    trace: Trace[Any] = Trace()
    found = trace.add_input(np.array([1.0, 2.0]))
    for name, value in {
        "scores": scores * SCORES,
        "softmax": softmax * WEIGHTS,
        "product": out * OUT,
        "square": out * OUT**2,
    }.items():
        found = trace.add(value, found, name)
    return trace


@pytest.mark.parametrize(
    ("factors", "chance"),
    [
        ((1.1, 1 + 1e-11, 1.1), {2}),
        ((1.1, 1.0, 1.1), set()),  # equal to rounding: the scores are computed otherwise
        ((1.1, 1 + 1e-11, 1 + 1e-11), set()),  # so is what is computed from it
        ((1 + 1e-11, 1 + 1e-11, 1.1), set()),
    ],
)
def test_a_value_that_is_closer_than_those_before_and_after_it_is_equal_by_chance(
    factors: tuple[float, float, float], chance: set[int]
) -> None:
    ours, theirs = attended(1, 1, 1), attended(*factors)
    same = {i: equal for i, equal in enumerate(counterparts(ours, theirs)) if equal}
    assert 2 in same
    assert by_chance(ours, theirs, same, range(1, 5)) == chance
