"""Padding and packing: no token is lost, repeated or visible to another text."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import PackedRows, first_fit, pack, pad_tokens
from jaxtrain.data.loader import Loader
from jaxtrain.errors import UserError

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda lengths: max(lengths) > 1)


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Return documents whose tokens encode their document and their position in it."""
    return [1000 * (d + 1) + np.arange(length, dtype=np.int32) for d, length in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 12))
def test_every_pair_of_successive_tokens_is_packed_exactly_once(lengths: list[int], length: int) -> None:
    packed = pack(numbered(lengths), length, pad=0)
    rows = [packed[i] for i in range(len(packed))]
    found = sorted(
        (int(token), int(target))
        for row in rows
        for token, target, segment in zip(row["tokens"], row["targets"], row["segments"], strict=True)
        if segment
    )
    assert found == sorted((int(a), int(b)) for d in numbered(lengths) for a, b in pairwise(d))
    assert all(row[name].shape == (length,) and row[name].dtype == np.int32 for row in rows for name in row)


@given(LENGTHS, st.integers(1, 12))
def test_a_segment_is_a_contiguous_part_of_one_document_with_positions_from_zero(
    lengths: list[int], length: int
) -> None:
    packed = pack(numbered(lengths), length, pad=-7)
    for i in range(len(packed)):
        row = packed[i]
        count = row["segments"].max()
        assert (np.diff(row["segments"][row["segments"] > 0]) >= 0).all()
        assert set(row["segments"].tolist()) - {0} == set(range(1, count + 1))
        for segment in range(1, count + 1):
            (indices,) = np.nonzero(row["segments"] == segment)
            assert (np.diff(indices) == 1).all()
            assert (np.diff(row["tokens"][indices]) == 1).all()  # one document, in order
            assert row["positions"][indices].tolist() == list(range(len(indices)))
        empty = row["segments"] == 0
        assert (row["tokens"][empty] == -7).all()
        assert not row["positions"][empty].any()
        assert not empty[: empty.argmax()].any() or not empty.any()  # padding is at the end of a row


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(9, 14))
def test_first_fit_equals_a_direct_implementation(sizes: list[int], capacity: int) -> None:
    expected: list[list[int]] = []
    for i, size in enumerate(sizes):
        room = (b for b in expected if sum(sizes[j] for j in b) + size <= capacity)
        (next(room, None) or expected.append(found := []) or found).append(i)
    assert first_fit(sizes, capacity) == expected


@settings(max_examples=15)
@given(LENGTHS, st.integers(2, 12), st.integers(0, 5))
def test_the_order_of_packed_rows_depends_on_the_seed_and_can_be_restored(
    lengths: list[int], length: int, seed: int
) -> None:
    def batches(count: int, position: dict | None = None) -> list[list]:
        loader = Loader(pack(numbered(lengths), length, pad=0), 1, seed)
        if position:
            loader.restore(position)
        return [next(loader)["tokens"].tolist() for _ in range(count)]

    loader = Loader(pack(numbered(lengths), length, pad=0), 1, seed)
    first = [next(loader)["tokens"].tolist() for _ in range(3)]
    assert first == batches(3)
    assert batches(2, loader.state()) == batches(5)[3:]


@given(st.lists(st.integers(0, 99), max_size=9), st.integers(1, 9))
def test_padding_keeps_the_tokens_that_fit(tokens: list[int], length: int) -> None:
    row, mask = pad_tokens(np.array(tokens, np.int32), length, pad=-1)
    assert row[mask].tolist() == tokens[:length]
    assert (row[~mask] == -1).all()
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    assert (row.dtype, row.shape) == (np.int32, (length,))


def test_packed_documents_can_be_pickled_and_check_their_bounds() -> None:
    packed = pack(numbered([5, 9, 2]), 4, pad=0)
    copy = pickle.loads(pickle.dumps(packed))
    assert isinstance(copy, PackedRows)
    assert [copy[i]["tokens"].tolist() for i in range(len(copy))] == [
        packed[i]["tokens"].tolist() for i in range(len(packed))
    ]
    for outside in (-1, len(packed)):
        with pytest.raises(IndexError):
            packed[outside]


def test_documents_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(UserError, match="length of a row must be at least 1, got 0"):
        pack(numbered([3]), 0, pad=0)
    with pytest.raises(UserError, match="none of 2 texts has two tokens"):
        pack(numbered([1, 0]), 4, pad=0)
