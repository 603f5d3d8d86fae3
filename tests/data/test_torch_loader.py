"""PyTorch's DataLoader: its order depends on the seed, and global random generators are left alone."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from jaxtrain.data.batches import epoch_batches, training_batches
from jaxtrain.errors import UserError
from tests.data.any_data import take, torch_loader
from tests.data.augmented import Augmented


def global_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_a_dataloader_does_not_change_the_global_random_generators():
    torch.manual_seed(1)
    before = global_states()
    batches = training_batches(torch_loader(6, 2), 2, seed=0)
    expected = take(batches, 2)
    batches.restore({**batches.state(), "next_batch": 5})
    take(batches, 1)
    list(epoch_batches(torch_loader(6, 2), 2))
    assert global_states() == before
    torch.manual_seed(2)
    random.seed(2)
    assert take(training_batches(torch_loader(6, 2), 2, seed=0), 2) == expected
    assert take(training_batches(torch_loader(6, 2), 2, seed=1), 2) != expected


def test_a_dataloader_shuffles_every_epoch_and_reports_batches_read_again():
    messages = []
    batches = training_batches(torch_loader(50, 50), 50, seed=0)
    orders = {tuple(batch["x"]) for batch in take(batches, 4)}
    assert len(orders) == 4
    resumed = training_batches(torch_loader(50, 10), 10, seed=0, message=messages.append)
    resumed.restore({**resumed.state(), "next_batch": 3})
    assert len(take(resumed, 1)) == 1
    assert messages == ["reading 3 batches of the DataLoader again, up to where the run was saved"]


def test_the_workers_of_a_dataloader_resume_with_their_random_numbers():
    loader = DataLoader(Augmented(8), 2, shuffle=True, num_workers=2, multiprocessing_context="spawn")
    first = training_batches(loader, 2, seed=0)
    expected = take(first, 4)
    assert len({noise for batch in expected for noise in batch["noise"]}) == 8
    first.close()
    resumed = training_batches(loader, 2, seed=0)
    resumed.restore({**resumed.state(), "next_batch": 3})
    assert take(resumed, 1) == expected[3:]
    resumed.close()


class Numbers(IterableDataset):
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


def test_the_smaller_last_batch_of_a_dataloader_is_read_and_a_larger_one_refused():
    messages = []
    batches = training_batches(DataLoader(Numbers(), 2), 2, seed=0, batch_keys=("x",), message=messages.append)
    epoch = [{"x": [0, 1]}, {"x": [2, 3]}, {"x": [4]}]
    assert take(batches, 7) == [*epoch, *epoch, epoch[0]]
    assert messages == ["batch 2 of epoch 0 of the DataLoader has 1 rows, not 2: the step is compiled for them too"]
    divided = training_batches(DataLoader(Numbers(), 2), 2, seed=0, batch_keys=("x",), rows=[0])
    assert take(divided, 3) == [{"x": [0]}, {"x": [2]}, {"x": [0]}]
    larger = training_batches(DataLoader(range(6), batch_sampler=[[0, 1], [2, 3, 4]]), 2, seed=0, batch_keys=("x",))
    next(larger)
    with pytest.raises(UserError, match=r"^'x' of batch 1 of epoch 0 of the DataLoader has 3 rows, not 2: give the"):
        next(larger)
    empty = training_batches(DataLoader(range(1), 2, drop_last=True), 2, seed=0)
    with pytest.raises(UserError, match=r"^the DataLoader has no batch"):
        next(empty)


class Unknown(IterableDataset):
    def __iter__(self):
        return iter(range(7))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"rows": range(4)}])
def test_a_smaller_batch_of_a_loader_of_a_stream_is_dropped_with_a_line(options):
    messages = []
    named = {"batch_keys": ("x",), **options}
    first = training_batches(DataLoader(Unknown(), 4), 4, seed=0, message=messages.append, **named)
    whole = take(first, 3)
    assert whole == 3 * [{"x": [0, 1, 2, 3]}]
    assert len(messages) == 1
    assert messages[0].startswith("batch 1 of epoch 0 of the DataLoader has 3 rows, not 4, ")
    resumed = training_batches(DataLoader(Unknown(), 4), 4, seed=0, **named)
    resumed.restore({**resumed.state(), "next_batch": 3})
    assert resumed.state()["next_batch"] == first.state()["next_batch"] == 3
    assert take(resumed, 1) == take(first, 1)
    assert resumed.state() == first.state()


def test_a_loader_whose_only_batch_cannot_be_divided_is_refused():
    batches = training_batches(DataLoader(Unknown(), 8), 8, seed=0, accumulate=2, batch_keys=("x",))
    with pytest.raises(UserError, match=r"^batch 0 .* has 7 rows, and none has 8: use a smaller batch_size"):
        next(batches)


def test_tuples_of_a_dataloader_are_named():
    loader = DataLoader(TensorDataset(torch.arange(4), torch.ones(4, 2)), 2)
    batch = next(training_batches(loader, 2, seed=0, batch_keys=("x", "y")))
    assert (batch["x"].dtype, batch["y"].shape) == (np.int32, (2, 2))
    with pytest.raises(UserError, match="of the DataLoader is a list of 2 values: name them with batch_keys"):
        next(training_batches(loader, 2, seed=0))
