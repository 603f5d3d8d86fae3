"""Worker processes that read examples."""

import multiprocessing
import os
import threading
from itertools import islice

import numpy as np
import pytest

from jaxtrain.data import MappedSource, Subset
from jaxtrain.data.batches import training_batches
from jaxtrain.errors import UserError
from tests.data.any_data import take


class Numbered:
    """A source that its worker processes import."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 11:
            raise UserError("example 11 cannot be read")
        return {"x": index, "process": os.getpid(), "wide": 0.5}


def test_worker_processes_read_the_same_batches_and_resume_anywhere():
    source = MappedSource(Subset(Numbered(), np.arange(11)), lambda example: {**example, "x": example["x"] ** 2})
    expected = [batch["x"] for batch in take(training_batches(source, 2, seed=0), 10)]
    batches = training_batches(source, 2, seed=0, workers=2)
    assert take([batches.peek()], 1)[0]["x"] == expected[0]
    read = list(islice(batches, 4))
    assert [batch["x"].tolist() for batch in read] == expected[:4]
    assert len({process for batch in read for process in batch["process"].tolist()} - {os.getpid()}) == 2
    assert {type(batch["wide"]) for batch in read} == {np.ndarray}
    assert batches.state() == {**training_batches(source, 2, seed=0).state(), "next_batch": 4}
    batches.restore({**batches.state(), "next_batch": 7})
    assert [batch["x"] for batch in take(batches, 3)] == expected[7:]
    batches.close()
    assert not multiprocessing.active_children()


def test_a_failure_in_a_worker_process_is_raised_as_it_is():
    batches = training_batches(Numbered(), 12, seed=0, workers=1)
    with pytest.raises(UserError, match="example 11 cannot be read"):
        next(batches)
    assert batches.state()["next_batch"] == 0


def test_a_source_that_cannot_be_copied_to_workers_is_refused():
    class Locked(Numbered):
        lock = None

        def __init__(self):
            self.lock = threading.Lock()

    batches = training_batches(Locked(), 2, seed=0, workers=1)
    with pytest.raises(UserError, match=r"^the data cannot be copied to worker processes .*: set workers to 0$"):
        next(batches)
