"""Streams: their own state, their failures, and iterators that have one pass."""

import gc
import threading
import time

import pytest
from torch.utils.data import IterableDataset

from jaxtrain.data.batches import training_batches
from jaxtrain.errors import UserError
from tests.data.any_data import Stateful, examples, take


def test_threads_end_with_their_batches():
    def count():
        return sum(thread.name == "read ahead" for thread in threading.enumerate())

    before = count()
    batches = training_batches(lambda: iter(examples(9)), 2, seed=0)
    next(batches)
    del batches
    gc.collect()
    for _ in range(100):
        if count() == before:
            break
        time.sleep(0.02)
    assert count() == before


def test_the_own_state_of_a_stream_is_used_to_resume():
    batches = training_batches(Stateful(100), 10, seed=0)
    expected = take(batches, 12)[-1:]
    batches = training_batches(Stateful(100), 10, seed=0)
    take(batches, 11)
    stream = Stateful(100)
    resumed = training_batches(stream, 10, seed=0, prefetch=0)
    resumed.restore(batches.state())
    assert take(resumed, 1) == expected
    assert stream.reads == 10


class Continuing:
    """A stream whose iterators continue where the last one stopped, unless its state is loaded."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while True:
            self.next += 1
            yield {"x": self.next - 1}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_stream_with_its_own_state_returns_to_its_beginning():
    batches = training_batches(Continuing(), 2, seed=0)
    start = batches.state()
    batches.peek()
    batches.close()
    assert take(batches, 2) == [{"x": [0, 1]}, {"x": [2, 3]}]
    batches.restore(start)
    assert take(batches, 1) == [{"x": [0, 1]}]


def test_without_own_state_the_number_of_examples_read_again_is_reported():
    messages = []
    batches = training_batches(lambda: iter(examples(9)), 2, seed=0, message=messages.append)
    take(batches, 8)
    resumed = training_batches(lambda: iter(examples(9)), 2, seed=0, message=messages.append)
    resumed.restore(batches.state())
    assert take(resumed, 1) == take(batches, 1)
    assert [line for line in messages if "again" in line] == [
        "reading 6 examples of the stream again, up to where the run was saved"
    ]


def test_the_smaller_last_batch_of_an_epoch_is_reported_once_for_each_number_of_rows():
    messages = []
    sizes = iter([5, 6, 7, 5, 4, 4])
    batches = training_batches(lambda: iter(examples(next(sizes))), 4, seed=0, prefetch=0, message=messages.append)
    assert [len(batch["x"]) for batch in take(batches, 9)] == [4, 1, 4, 2, 4, 3, 4, 1, 4]
    line = "the last batch of epoch {} of the stream has {} rows, not 4: the step is compiled for them too"
    assert messages == [line.format(epoch, rows) for epoch, rows in enumerate((1, 2, 3))]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"accumulate": 2}, "which accumulate 2 does not divide"),
        ({"rows": [0, 1, 2, 3]}, "and a mesh takes whole batches"),
        ({"rows": [2]}, "and a mesh takes whole batches"),
    ],
)
def test_a_smaller_last_batch_that_cannot_be_divided_is_dropped_with_a_line(options, reason):
    messages = []

    def batches():
        return training_batches(lambda: iter(examples(7)), 4, seed=0, prefetch=0, message=messages.append, **options)

    first = batches()
    rows = options.get("rows", range(4))
    assert take(first, 2) == 2 * [{"x": [*rows]}]
    assert messages == [f"the last batch of epoch 0 of the stream has 3 rows, not 4, {reason}: it is dropped"]
    resumed = batches()
    resumed.restore(first.state())
    assert take(resumed, 2) == take(first, 2)


def test_the_position_after_a_smaller_batch_is_the_end_of_its_epoch():
    batches = training_batches(lambda: iter(examples(6)), 4, seed=0)
    take(batches, 2)
    place = batches.state()["place"]
    assert (place["epoch"], place["examples"], place["at"]) == (0, 6, 2)
    resumed = training_batches(lambda: iter(examples(6)), 4, seed=0)
    resumed.restore(batches.state())
    assert take(resumed, 1) == [{"x": [0, 1, 2, 3]}]


def test_a_stream_that_failed_continues_at_the_same_batch():
    failures = []

    def flaky():
        for example in examples(10):
            if example["x"] == 5 and not failures:
                failures.append(1)
                raise OSError("the network is unavailable")
            yield example

    batches = training_batches(flaky, 2, seed=0)
    assert take(batches, 2) == [{"x": [0, 1]}, {"x": [2, 3]}]
    with pytest.raises(OSError, match="the network is unavailable"):
        next(batches)
    assert batches.state()["next_batch"] == 2
    assert take(batches, 2) == [{"x": [4, 5]}, {"x": [6, 7]}]


def test_an_iterator_is_read_once():
    batches = training_batches(iter(examples(5)), 2, seed=0, prefetch=0)
    batches.peek()
    batches.restore(batches.state())  # as a new run does after its first look
    assert take(batches, 3) == [{"x": [0, 1]}, {"x": [2, 3]}, {"x": [4]}]
    with pytest.raises(UserError, match=r"^the stream ended after 5 examples, and an iterator cannot restart: give a"):
        next(batches)
    state = training_batches(iter(examples(5)), 2, seed=0).state()
    batches.restore(state)
    with pytest.raises(UserError, match=r"^an iterator cannot return to example 0 from 5: give a function that"):
        next(batches)
    resumed = training_batches(iter(examples(5)), 2, seed=0)
    resumed.restore({**state, "next_batch": 1})
    assert take(resumed, 1) == [{"x": [2, 3]}]


class NoJson(Stateful):
    def state_dict(self):
        return {"rng": {1, 2}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: iter(examples(1)), "^epoch 0 of the stream has 1 examples, fewer than a batch of 2: use a smaller"),
        (lambda: iter([{"x": 1}, {"x": "text"}]), r"^'x' of example 1 is 'text' \(str\), not numbers"),
        (NoJson(5), "^the stream's own state is not JSON"),
        (iter([(1,), (2,)]), "^example 0 is a tuple of 1 values: name them with batch_keys"),
    ],
)
def test_invalid_streams_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        next(training_batches(data, 2, seed=0))


def test_a_stream_that_cannot_start_again_or_became_shorter_is_refused():
    spent = iter(examples(4))
    batches = training_batches(lambda: spent, 2, seed=0)
    with pytest.raises(
        UserError, match=r"^epoch 1 of the stream has 0 examples, .* give a function that returns a new"
    ):
        take(batches, 3)
    longer = training_batches(lambda: iter(examples(9)), 2, seed=0)
    take(longer, 4)
    for shorter in (batches, training_batches(lambda: iter(examples(7)), 2, seed=0)):
        shorter.restore(longer.state())
        with pytest.raises(UserError, match=r"^epoch 0 of the stream ended before example 8, where the run was saved"):
            next(shorter)


def test_an_iterable_dataset_of_pytorch_is_a_stream():
    class Numbers(IterableDataset):
        def __len__(self):
            return 5

        def __iter__(self):
            return iter(range(5))

    batches = training_batches(Numbers(), 2, seed=0, collate=lambda numbers: {"x": numbers})
    assert take(batches, 4) == [{"x": [0, 1]}, {"x": [2, 3]}, {"x": [4]}, {"x": [0, 1]}]
