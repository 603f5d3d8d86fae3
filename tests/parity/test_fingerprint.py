"""Which values of two programs have equal fingerprints."""

import numpy as np
import pytest

from parity.compare.fingerprint import NOISE, Fingerprint, Trace, correct, counterparts, distances, fingerprint


@pytest.mark.parametrize("name", ["reduce_max", "amax", "aten.min", "sum", "square"])
def test_what_a_correct_value_was_computed_from_is_correct_unless_it_is_an_extremum(name: str) -> None:
    trace: Trace[str] = Trace()
    x = trace.add_input(np.array([1.0, 2.0, 4.0]))
    y = trace.add(np.array([3.0, 7.0, 11.0]), x, "affine")
    z = trace.add(np.array(11.0), y, name)
    sources = frozenset() if name.endswith(("max", "min")) else x | y
    everywhere = range(len(trace.values))
    assert correct(trace, z, everywhere) == z | sources
    assert correct(trace, y | z, everywhere) == x | y | z
    assert correct(trace, z, forward=()) == z


def test_a_sum_that_cancels_is_not_matched() -> None:
    trace: Trace[str] = Trace()
    x = trace.add_input(np.array([1.0, -1.0]))
    assert trace.add(np.array([1e-17]), x, "sum") == NOISE


def test_constants_match_as_broadcasts_masks_and_tables_for_longer_sequences() -> None:
    ours: Trace[str] = Trace()
    theirs: Trace[str] = Trace()
    for trace in (ours, theirs):
        trace.add_batch(np.ones((2, 4), int))
    positions = np.arange(1, 5)
    masked = np.where(np.tril(np.ones((4, 4))), 0, -np.inf)
    ours.add(np.broadcast_to(positions, (2, 4)), frozenset(), "positions")
    theirs.add(positions[None], frozenset(), "positions")
    ours.add(np.tril(np.ones((8, 8), bool))[None], frozenset(), "mask")
    theirs.add(masked, frozenset(), "mask")
    theirs.add(positions - 2, frozenset(), "shifted")
    assert counterparts(theirs, ours)[1:] == [frozenset({1}), frozenset({2}), frozenset()]


def test_values_match_in_any_layout_but_not_with_a_relative_error_of_a_billionth() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    traces: list[Trace[str]] = [Trace() for _ in range(3)]
    for trace, value in zip(traces, [x, x.transpose(2, 0, 1) * (1 + 1e-12), x * (1 + 1e-9)], strict=True):
        trace.add_input(value)
    assert counterparts(traces[0], traces[1]) == [frozenset({0})]
    assert counterparts(traces[0], traces[2]) == [frozenset()]


def test_halves_rotated_with_the_other_sign_are_other_values() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 4)) + 1
    ours, theirs = (trace_of(x) for x in (np.concatenate([b + 9, -a]), np.concatenate([a, b + 9])))
    assert counterparts(theirs, ours) == [frozenset()]
    assert counterparts(theirs, trace_of(np.concatenate([b + 9, a]))) == [frozenset({0})]


def test_complex_numbers_match_as_pairs_and_not_as_their_conjugates() -> None:
    z = np.array([1 + 2j, 3 - 1j])
    pairs = trace_of(np.array([[1.0, 2.0], [3.0, -1.0]]))
    assert counterparts(trace_of(z), pairs) == [frozenset({0})]
    assert counterparts(trace_of(z.conj()), pairs) == [frozenset()]
    of_batch: Trace[str] = Trace()
    x = of_batch.add_batch(z)
    assert of_batch.add(z, x, "copy") == x


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_fingerprint_is_that_of_every_layout_and_of_repetitions(shape: tuple[int, ...], masked: bool) -> None:
    x = np.array(np.random.default_rng(0).random(shape) + 1)
    x.flat[0] -= np.inf if masked else 0
    for y in (x.T, x.ravel(), x[None], np.broadcast_to(x, (5, *shape)), np.repeat(x, 3)):
        np.testing.assert_allclose(fingerprint(y), fingerprint(x), rtol=1e-14)


def test_masked_elements_and_nan_count_as_zeros() -> None:
    assert fingerprint(np.array([1.0, -2.0, np.nan, -np.inf])) == Fingerprint(5 / 4, 3 / 4, 1.0, -1 / 4)
    assert fingerprint(np.array([1.0, -2.0, -1e38])) == Fingerprint(5 / 3, 1.0, 1.0, -1 / 3)
    assert fingerprint(np.array([1.0, -2.0])) == Fingerprint(5 / 2, 3 / 2, 1.0, -1 / 2)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_distances_are_relative(size: float) -> None:
    x = size * np.random.default_rng(0).standard_normal(8)
    assert distances(trace_of(x), trace_of(1.125 * x), [0]) == {0: pytest.approx(1 - 1.125**-2)}


def trace_of(value: np.ndarray) -> Trace[str]:
    trace: Trace[str] = Trace()
    trace.add_input(value)
    return trace
