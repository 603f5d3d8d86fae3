"""Batching: the contents of an epoch, and restoring any position."""

import json
import subprocess
import sys
from itertools import islice
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxtrain.data import Arrays, Example
from jaxtrain.data.loader import Loader, epoch_batches
from jaxtrain.errors import UserError


def numbered(length: int) -> Arrays:
    return Arrays(np.arange(length, dtype=np.float32)[:, None], np.arange(length, dtype=np.int32))


def labels(loader: Loader, count: int) -> list[list[int]]:
    return [batch["label"].tolist() for batch in islice(loader, count)]


SIZES = st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
SEEDS = st.integers(0, 2**40)


@st.composite
def sizes_and_order(draw: st.DrawFn) -> tuple[int, int, bool]:
    """Draw (length, batch_size, shuffle). Grain takes 30 ms to shuffle an epoch of any length: few are passed."""
    shuffle = draw(st.booleans())
    length = draw(st.integers(20, 60) if shuffle else st.integers(1, 20))
    return length, draw(st.integers(1, length // 4 if shuffle else length)), shuffle


@settings(max_examples=12, deadline=None)
@given(sizes_and_order(), SEEDS, st.integers(0, 30), st.integers(0, 8))
@example((5, 2, True), 3, 4, 1)
def test_resuming_at_any_position_equals_an_uninterrupted_loader(
    sizes: tuple[int, int, bool], seed: int, stop: int, read_past: int
) -> None:
    length, batch_size, shuffle = sizes
    uninterrupted = labels(Loader(numbered(length), batch_size, seed, shuffle), stop + 8)
    loader = Loader(numbered(length), batch_size, seed, shuffle)
    assert labels(loader, stop) == uninterrupted[:stop]
    saved = json.dumps(loader.state())
    labels(loader, read_past)
    for resumed in (loader, Loader(numbered(length), batch_size, seed, shuffle)):
        resumed.restore(json.loads(saved))
        assert resumed.state() == json.loads(saved)
        assert labels(resumed, 8) == uninterrupted[stop:]


@settings(max_examples=40, deadline=None)
@given(SIZES, SEEDS, st.booleans())
def test_an_epoch_has_every_example_once_up_to_the_dropped_remainder(
    sizes: tuple[int, int], seed: int, shuffle: bool
) -> None:
    length, batch_size = sizes
    loader = Loader(numbered(length), batch_size, seed, shuffle)
    for _ in range(3):
        seen = [label for batch in labels(loader, length // batch_size) for label in batch]
        assert len(set(seen)) == len(seen) == length - length % batch_size
        assert set(seen) <= set(range(length))
        assert shuffle or seen == sorted(seen)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_order_does_not_depend_on_threads_or_prefetch(threads: int) -> None:
    expected = labels(Loader(numbered(50), 4, seed=3), 30)
    for prefetch in (0, 4, 32):
        assert labels(Loader(numbered(50), 4, seed=3, num_threads=threads, prefetch=prefetch), 30) == expected


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = set()
    for seed in range(3):
        loader = Loader(numbered(50), 50, seed)
        orders |= {tuple(order) for order in labels(loader, 3)}
    assert len(orders) == 9


def test_batches_stack_examples_row_by_row() -> None:
    batch = next(Loader(numbered(9), 4, seed=0))
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    assert (batch["image"].shape, batch["label"].shape) == ((4, 1), (4,))
    assert (batch["image"][:, 0] == batch["label"]).all()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_writing_into_a_batch_does_not_change_the_source(batch_size: int) -> None:
    source = numbered(2)
    for batches in (Loader(source, batch_size, 0, shuffle=False), epoch_batches(source, batch_size)):
        next(batches)["image"][:] = -1
    assert source.images[:, 0].tolist() == [0, 1]


def test_a_failed_batch_is_retried() -> None:
    class Flaky(Arrays):
        def __getitem__(self, index: int, /) -> Example:
            if index == 2 and not failures:
                failures.append(index)
                raise UserError("the disk is unavailable")
            return super().__getitem__(index)

    failures: list[int] = []
    source = numbered(6)
    loader = Loader(Flaky(source.images, source.labels), 1, seed=0, shuffle=False)
    assert labels(loader, 2) == [[0], [1]]
    with pytest.raises(UserError, match="the disk is unavailable"):
        next(loader)
    assert loader.state()["next_batch"] == 2
    assert labels(loader, 3) == [[2], [3], [4]]


@pytest.mark.parametrize(
    ("batch_size", "seed", "message"),
    [(4, 0, "number of examples, 3, got 4"), (0, 0, "at least 1, got 0"), (1, -1, "seed must be at least 0, got -1")],
)
def test_invalid_arguments_of_a_loader_are_refused(batch_size: int, seed: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Loader(numbered(3), batch_size, seed)


def test_a_position_of_a_different_order_is_refused() -> None:
    state = Loader(numbered(8), 2, seed=0).state()
    others = {
        "examples": Loader(numbered(9), 2, seed=0),
        "batch_size": Loader(numbered(8), 4, seed=0),
        "seed": Loader(numbered(8), 2, seed=1),
        "shuffle": Loader(numbered(8), 2, seed=0, shuffle=False),
    }
    for name, other in others.items():
        with pytest.raises(UserError, match=f"saved with {name} "):
            other.restore(state)


@given(st.integers(0, 20), st.integers(1, 8))
def test_evaluation_reads_each_example_once_in_batches_of_one_shape(length: int, batch_size: int) -> None:
    batches = list(epoch_batches(numbered(length), batch_size))
    assert len(batches) == -(-length // batch_size)
    for batch in batches:
        assert {name: array.shape[0] for name, array in batch.items()} == dict.fromkeys(
            ("image", "label", "weight"), batch_size
        )
        assert batch["weight"].dtype == np.float32
    seen = [label for b in batches for label in b["label"][b["weight"] == 1]]
    assert seen == list(range(length))
    assert sum(float(b["weight"].sum()) for b in batches) == length


@st.composite
def shares(draw: st.DrawFn, of: int) -> list[list[int]]:
    """Draw the rows of each process: every row of a batch of `of` belongs to one or several processes."""
    shares: list[list[int]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for position in range(of):
        for process in draw(st.sets(st.sampled_from(range(len(shares))), min_size=1)):
            shares[process].append(position)
    return [share for share in shares if share]


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(64, 100), st.integers(1, 12), SEEDS, st.integers(0, 12))
def test_the_rows_of_all_processes_form_the_batch_and_any_number_of_processes_continues(
    data: st.DataObject, length: int, batch_size: int, seed: int, stop: int
) -> None:
    """This holds for any division of the rows, before and after a restart."""
    whole = labels(Loader(numbered(length), batch_size, seed, num_threads=0), stop + 4)
    saved = Loader(numbered(length), batch_size, seed).state()
    for begin, count in ((0, stop), (stop, 4)):
        positions = []
        for rows in data.draw(shares(batch_size)):
            loader = Loader(numbered(length), batch_size, seed, num_threads=0, rows=rows)
            loader.restore(json.loads(json.dumps(saved)))
            expected = [[batch[r] for r in rows] for batch in whole[begin : begin + count]]
            assert labels(loader, count) == expected
            positions.append(loader.state())
        assert all(position == positions[0] for position in positions)
        saved = positions[0]


def test_a_process_reads_only_its_rows() -> None:
    read: list[int] = []

    class Watched(Arrays):
        def __getitem__(self, index: int, /) -> Example:
            read.append(index)
            return super().__getitem__(index)

    source = Watched(numbered(24).images, numbered(24).labels)
    loader = Loader(source, 6, seed=0, shuffle=False, num_threads=0, rows=[1, 4])
    assert labels(loader, 4) == [[1, 4], [7, 10], [13, 16], [19, 22]]
    assert set(read) == {1, 4, 7, 10, 13, 16, 19, 22}
    read.clear()
    batches = list(epoch_batches(source, 10, rows=[0, 3, 7]))
    assert [b["label"].tolist() for b in batches] == [[0, 3, 7], [10, 13, 17], [20, 23, 23]]
    assert [b["weight"].tolist() for b in batches] == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
    assert read == [0, 3, 7, 10, 13, 17, 20, 23]


def test_a_process_computes_the_numbers_of_its_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the whole batch would take minutes, in each of thousands of processes."""
    shuffled = type(grain.MapDataset.range(2).seed(0).shuffle())
    computed, right = [], shuffled.__getitem__

    def counted(numbers: Any, index: Any) -> Any:
        computed.append(index)
        return right(numbers, index)

    monkeypatch.setattr(shuffled, "__getitem__", counted)

    class Numbers:
        def __len__(self) -> int:
            return 2**24

        def __getitem__(self, index: int, /) -> Example:
            return {"label": np.int32(index)}

    loader = Loader(Numbers(), 2**23, seed=0, num_threads=0, prefetch=0, rows=[0, 2**23 - 1])
    assert len({label for batch in labels(loader, 5) for label in batch}) >= 8
    assert len(computed) == 10


def test_evaluation_stops_at_its_limit_of_batches() -> None:
    assert [b["label"].tolist() for b in epoch_batches(numbered(9), 2, limit=2)] == [[0, 1], [2, 3]]


def test_importing_the_loader_emits_no_warning() -> None:
    program = [sys.executable, "-W", "error", "-c", "import jaxtrain.data.loader"]
    assert subprocess.run(program, capture_output=True, check=True).stderr == b""
