"""Training batches of any data: each kind resumes at any batch, and is refused in one line if it cannot."""

import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from jaxtrain.data import Arrays, pack
from jaxtrain.data.batches import epoch_batches, training_batches
from jaxtrain.errors import UserError
from tests.data.any_data import KINDS, examples, take, torch_loader
from tests.data.augmented import Augmented

# Of fewer examples, grain draws the shuffled indices slowly.
SIZES = st.integers(8, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("DataFrame", "grain source")])
@settings(max_examples=2, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 2**40), prefetch=st.integers(0, 5), stop=st.integers(0, 9), data=st.data())
def test_resuming_at_any_batch_equals_uninterrupted_batches(kind, sizes, seed, prefetch, stop, data):
    """This includes skipping batches after the saved position, as a rollback does."""
    length, batch_size = sizes

    def batches():
        return training_batches(KINDS[kind](length, batch_size), batch_size, seed, prefetch=prefetch)

    skip, read_past = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    uninterrupted = take(batches(), stop + skip + 3)
    first = batches()
    assert take(first, stop) == uninterrupted[:stop]
    saved = json.dumps(first.state())
    take(first, read_past)
    for resumed in (first, batches()):
        if data.draw(st.booleans()):
            assert take([resumed.peek()], 1)[0].keys() == uninterrupted[0].keys()
        resumed.restore({"interval": None, **json.loads(saved)})
        assert resumed.state() == json.loads(saved)
        resumed.restore({**resumed.state(), "next_batch": stop + skip})
        assert resumed.state()["next_batch"] == stop + skip
        assert take([resumed.peek()], 1) == uninterrupted[stop + skip :][:1]
        assert take(resumed, 3) == uninterrupted[stop + skip :]


STREAMS = {"iterable", "factory", "stateful", "grain"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_has_whole_batches_of_distinct_examples_and_a_stream_all_of_them(kind):
    count, read = (4, 7) if kind in STREAMS else (3, 6)
    batches = take(training_batches(KINDS[kind](7, 2), 2, seed=0), 2 * count)
    for epoch in (batches[:count], batches[count:]):
        assert [len(batch["x"]) for batch in epoch[:3]] == [2, 2, 2]
        assert len({x for batch in epoch for x in batch["x"]}) == sum(len(batch["x"]) for batch in epoch) == read


@pytest.mark.parametrize("kind", KINDS)
def test_rows_select_from_the_same_batches(kind):
    whole = take(training_batches(KINDS[kind](8, 4), 4, seed=0), 3)
    batches = training_batches(KINDS[kind](8, 4), 4, seed=0, rows=[3, 1])
    assert batches.rows.tolist() == [3, 1]
    assert take(batches, 3) == [{name: [x[3], x[1]] for name, x in batch.items()} for batch in whole]


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_pads_the_last_batch(kind):
    data = KINDS[kind](5, 5) if "DataLoader" in kind else KINDS[kind](5, 2)
    for _ in range(2):
        batches = list(epoch_batches(data, 2))
        assert [batch["weight"].tolist() for batch in batches] == [[1, 1], [1, 1], [1, 0]]
        assert sorted(x for batch in batches for x in batch["x"][batch["weight"] == 1].tolist()) == [0, 1, 2, 3, 4]
    assert len(list(epoch_batches(data, 2, limit=2))) == 2
    with pytest.raises(UserError, match=r"^batch_size must be at least 1, got 0"):
        next(epoch_batches(data, 0))


@pytest.mark.parametrize("kind", ["mapping", "factory"])
def test_batches_are_read_in_the_background_up_to_prefetch(kind):
    read = threading.Semaphore(0)

    def stream():
        for example in examples(20):
            read.release()
            yield example

    class Source:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            read.release()
            return {"x": index}

    batches = training_batches(Source() if kind == "mapping" else stream, 2, seed=0, prefetch=3)
    batches.peek()
    time.sleep(0.05)
    assert [read.acquire(timeout=0) for _ in range(3)] == [True, True, False]
    next(batches)
    next(batches)
    assert all(read.acquire(timeout=5) for _ in range(8))
    assert batches.state()["next_batch"] == 2


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (3, {}, "^the data is of type int: give a mapping of arrays"),
        (Augmented, {}, "^the data is the class Augmented: give an instance of it"),
        ({"train": Augmented(8)}, {}, r"^the data is a mapping of datasets: give one of them, such as data\['train'\]"),
        (examples(3), {"prefetch": -1}, "^the number of batches to prefetch must be at least 0, got -1"),
        (iter(()), {"prefetch": -1}, "^the number of batches to prefetch must be at least 0, got -1"),
        ("file.txt", {}, "^the data is of type str: give a mapping of arrays"),
        (
            pack([np.arange(3, dtype=np.int32)] * 4, 4, pad=0),
            {"batch_size": 9},
            "^the examples fill 2 rows of 4 tokens, fewer than batch_size 9: use a smaller one, or a smaller seq_len",
        ),
        (examples(3), {"batch_size": 4}, "^batch_size must be at most the number of examples, 3, got 4"),
        (examples(3), {"workers": -1}, "^the number of workers must be at least 0, got -1"),
        (iter(()), {"batch_size": 0}, "^batch_size must be at least 1, got 0"),
        (iter(()), {"workers": 2}, "^workers=2 needs data with a length"),
        (torch_loader(8, 2), {"seed": -1}, "^the data seed must be at least 0, got -1"),
        (torch_loader(8, 2), {"workers": 2}, "^workers does not apply to a DataLoader: use its num_workers"),
        (torch_loader(8, 2), {"collate": dict}, "^collate does not apply to a DataLoader: use its collate_fn"),
        (torch_loader(8, 4), {}, "^the DataLoader has batch_size 4, but the run has 2: give both the same"),
        (
            DataLoader(range(5), 2),
            {"rows": [1, 0]},
            "^the last batch of the DataLoader has 1 rows, not 2, and a mesh takes whole batches: give it drop_",
        ),
    ],
)
def test_invalid_data_and_options_are_refused(data, options, message):
    with pytest.raises(UserError, match=message):
        training_batches(data, **{"batch_size": 2, "seed": 0, **options})


def test_a_position_of_other_data_is_refused():
    makers = {
        "list": lambda size, seed: training_batches(examples(8), size, seed),
        "stream": lambda size, seed: training_batches(lambda: iter(examples(8)), size, seed),
        "DataLoader": lambda size, seed: training_batches(torch_loader(8, size), size, seed),
    }
    for name, make in makers.items():
        with pytest.raises(UserError, match=r"^the data position was saved with batch_size 2, not 4"):
            make(4, 0).restore(make(2, 0).state())
        for other in makers.keys() - {name}:
            with pytest.raises(UserError, match=r"^the data position was saved (with data|for another kind of data)"):
                make(2, 0).restore(makers[other](2, 0).state())
    with pytest.raises(UserError, match=r"^the data position was saved with seed 1, not 0"):
        makers["DataLoader"](2, 0).restore(makers["DataLoader"](2, 1).state())


def test_the_iterator_of_an_evaluation_is_refused():
    with pytest.raises(UserError, match=r"^an iterator has one pass"):
        next(epoch_batches(iter(examples(3)), 2))
    with pytest.raises(UserError, match=r"^the stream to evaluate has no examples"):
        next(epoch_batches(lambda: iter(()), 2))


def test_getitems_reads_a_batch_at_once():
    class Rows(Arrays):
        calls = 0

        def __getitem__(self, index):
            raise AssertionError

        def __getitems__(self, numbers):
            Rows.calls += 1
            return [{"x": number} for number in numbers]

    data = Rows(np.zeros(9), np.zeros(9))
    assert len(take(training_batches(data, 3, seed=0, prefetch=0), 2)) == Rows.calls == 2
    assert [batch["x"].tolist() for batch in epoch_batches(data, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 8]]


def test_datasets_of_hugging_face_are_sources_and_streams():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(9)), "tokens": [[i, i] for i in range(9)]})
    batches = take(training_batches(rows, 3, seed=0), 3)
    assert sorted(x for batch in batches for x in batch["x"]) == list(range(9))
    stream = rows.to_iterable_dataset(num_shards=3)
    expected = take(training_batches(stream, 2, seed=0), 9)
    assert [batch["x"] for batch in expected[:5]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    for stop in range(9):
        first = training_batches(stream, 2, seed=0)
        take(first, stop)
        resumed = training_batches(rows.to_iterable_dataset(num_shards=3), 2, seed=0)
        resumed.restore(json.loads(json.dumps(first.state())))
        assert take(resumed, 9 - stop) == expected[stop:]
        first.close()
