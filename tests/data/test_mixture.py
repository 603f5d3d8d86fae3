"""Mixtures: exact proportions, epochs of every source, and one order for any number of processes."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import Mixture, Permutation
from jaxtrain.data.batches import training_batches
from jaxtrain.data.corpus import CorpusRows, TokenCorpus
from jaxtrain.data.mixture import assignment, integer_ratio
from jaxtrain.errors import UserError
from tests.data.shards import write_corpus


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.tuples(st.integers(0, 2**62), st.integers(0, 2**40)))
def test_a_permutation_has_every_entry_once(size, key):
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == [*range(size)]


def test_a_permutation_of_any_size_spreads_consecutive_numbers_evenly():
    for size in (10**6 + 3, 2**40, 2**62):
        entries = Permutation(size, (3,))(np.arange(size - 20_000, size))
        assert len(np.unique(entries)) == 20_000
        assert 0 <= entries.min() <= entries.max() < size
        counts = np.histogram(entries / size, 50, (0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square with 49 degrees of freedom
        assert abs(np.corrcoef(entries[:-1] / size, entries[1:] / size)[0, 1]) < 0.03
    orders = {tuple(Permutation(4, (seed, epoch))(np.arange(4)).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 24


def test_the_order_of_a_seed_never_changes():
    """A saved position would otherwise continue in another order."""
    assert Permutation(1000, (0, 0, 0))(np.arange(4)).tolist() == [414, 524, 255, 391]
    assert assignment([5, 3, 1]) == [0, 1, 0, 1, 0, 0, 2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_after_n_rows_every_source_has_its_share_of_them_to_within_one(counts):
    order = np.array(assignment(counts))
    total = sum(counts)
    had = np.cumsum(order[:, None] == np.arange(len(counts)), axis=0)
    deviation = abs(had * total - np.arange(1, total + 1)[:, None] * np.array(counts)).max()
    assert deviation < total
    assert had[-1].tolist() == counts  # so that the order repeats with the same deviations


@pytest.mark.parametrize("seed", [0, None])
def test_every_source_has_its_own_epochs(seed):
    mixture = Mixture([range(7), range(30), range(4)], [0.5, "0.3", Fraction(1, 5)])
    places = mixture.places(np.arange(400), seed)
    for source, (length, weight) in enumerate(((7, 0.5), (30, 0.3), (4, 0.2))):
        examples = places.examples[places.sources == source]
        assert len(examples) == 400 * weight
        epochs = examples[: len(examples) // length * length].reshape(-1, length)
        assert (np.sort(epochs, axis=1) == np.arange(length)).all()
        assert seed is None or len(np.unique(epochs, axis=0)) == len(epochs) or length < 5
    again = mixture.places(np.array([399, 5]), seed)
    assert [x.tolist() for x in again] == [x[[399, 5]].tolist() for x in places]


def test_as_a_source_a_mixture_is_its_rows_until_a_source_is_exhausted():
    mixture = Mixture([[{"x": i} for i in range(5)], [{"x": 10 + i} for i in range(9)]], [2, 1])
    rows = [mixture[i]["x"] for i in range(len(mixture))]
    assert [x for x in rows if x < 10] == [0, 1, 2, 3, 4]
    assert [x for x in rows if x >= 10] == [10, 11, 12][: len(rows) - 5]
    assert mixture.places(np.array([len(mixture)]), None).examples.tolist() == [0]  # that row would repeat one
    with pytest.raises(IndexError):
        mixture[len(mixture)]


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ([], None, "no sources"),
        ([[1], []], None, "source 1 of the mixture has no examples"),
        ([[1], [1]], [1], "2 sources but 1 weights"),
        ([[1]], ["x"], "weight x of a mixture is not a positive number"),
        ([[1], [1]], [1, float("nan")], "weight nan"),
        ([[1], [1]], [0.123456789, 0.3], "use fewer digits"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(sources, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture(sources, weights)


def test_weights_are_exact():
    assert integer_ratio([0.1, 0.2, "0.7"]) == (1, 2, 7)
    assert integer_ratio(["1/3", Fraction(2, 3)]) == (1, 2)


def process_rows(batch_size, accumulate, process, count):
    """Return the rows that one of `count` processes supplies: its share of every micro-batch (`local_rows`)."""
    return np.arange(batch_size).reshape(accumulate, count, -1)[:, process].reshape(-1)


def test_1024_processes_read_each_its_own_rows_and_any_number_continues(tmp_path, monkeypatch):
    """The rows of all processes form the batch of one process; none is read twice, and nothing else is read."""
    length, size = 7, 2048
    folders = [write_corpus(tmp_path / f"{shards}", shards) for shards in (40, 9)]
    mixture = Mixture([CorpusRows(TokenCorpus(folder), length) for folder in folders], [0.7, 0.3])
    read = []
    real = TokenCorpus.read

    def recording(self, start, stop):
        read.append((self.folder, start, stop))
        return real(self, start, stop)

    monkeypatch.setattr(TokenCorpus, "read", recording)

    def batches(rows=None):
        return training_batches(mixture, size, seed=5, rows=rows, prefetch=0)

    whole = batches()
    expected = [next(whole)["tokens"] for _ in range(3)]
    of_one = [read[i : i + size] for i in range(0, 3 * size, size)]
    position = batches().state()
    for step, processes in enumerate((1024, 8, 64)):
        states = []
        found, read_by_all = np.zeros_like(expected[step]), []
        for process in range(processes):
            rows = process_rows(size, 2, process, processes)
            own = batches(rows)
            own.restore(json.loads(json.dumps(position)))
            read.clear()
            found[rows] = next(own)["tokens"]
            assert len(read) == size // processes
            assert sum(stop - start for _, start, stop in read) == len(rows) * (length + 1)
            read_by_all += read
            states.append(own.state())
        np.testing.assert_array_equal(found, expected[step])
        assert sorted(read_by_all) == sorted(of_one[step])
        assert all(state == states[0] for state in states)
        position = states[0]
        assert position["place"] == (step + 1) * size
    first_epoch = [place for batch in of_one for place in batch if place[0] == folders[0]]
    rows = len(mixture.sources[0])
    assert len({*first_epoch[:rows]}) == min(rows, len(first_epoch))


def test_a_position_of_another_mixture_is_refused():
    state = training_batches(Mixture([[{"x": 1}] * 6]), 2, seed=0).state()
    for other, name in (
        (training_batches(Mixture([[{"x": 1}] * 7]), 2, seed=0), "examples"),
        (training_batches(Mixture([[{"x": 1}] * 6]), 3, seed=0), "batch_size"),
        (training_batches([{"x": 1}] * 6, 2, seed=0), "examples"),
    ):
        with pytest.raises(UserError, match=f"saved with {name} "):
            other.restore(state)
    with pytest.raises(UserError, match="workers=2 does not apply to a mixture"):
        training_batches(Mixture([[{"x": 1}] * 6]), 2, seed=0, workers=2)
