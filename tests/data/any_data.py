"""Data of each kind that `training_batches` takes."""

import random
from itertools import islice

import grain
import numpy as np
import pandas
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests.data.augmented import Augmented


def examples(length):
    return [{"x": i} for i in range(length)]


class Stateful:
    """A stream with `set_epoch`, and a state of its own that it changes in place, by which it continues at once."""

    def __init__(self, length):
        self.length, self.state, self.reads = length, {"epoch": 0, "start": 0}, 0

    def set_epoch(self, epoch):
        self.state.update(epoch=epoch, start=0)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state.update(state)

    def __iter__(self):
        while self.state["start"] < self.length:
            self.state["start"] += 1
            self.reads += 1
            yield {"x": 100 * self.state["epoch"] + self.state["start"] - 1}


def torch_loader(length, batch_size):
    return DataLoader(Augmented(length), batch_size, shuffle=True, drop_last=True)


def generator_loader(length, batch_size):
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    sampler = BatchSampler(RandomSampler(range(length), generator=generator), batch_size, drop_last=True)
    return DataLoader(Augmented(length), batch_sampler=sampler)


KINDS = {
    "mapping": lambda n, b: {"x": np.arange(n), "y": torch.arange(n)},
    "DataFrame": lambda n, b: pandas.DataFrame({"x": range(n), "y": np.ones(n)}),
    "list": lambda n, b: examples(n),
    "grain source": lambda n, b: grain.MapDataset.source(examples(n)),
    "iterable": lambda n, b: type("Iterable", (), {"__iter__": lambda self: iter(examples(n))})(),
    "factory": lambda n, b: lambda: iter(examples(n)),
    "stateful": lambda n, b: Stateful(n),
    "grain": lambda n, b: grain.MapDataset.source(examples(n)).shuffle(seed=0).to_iter_dataset(),
    "DataLoader": torch_loader,
    "DataLoader with generator": generator_loader,
}


def take(batches, count):
    return [{name: array.tolist() for name, array in batch.items()} for batch in islice(iter(batches), count)]
