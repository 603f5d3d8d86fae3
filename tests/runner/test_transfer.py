"""Batches on the devices ahead of the steps: in order, with the loader's positions, and to the same bits."""

import threading
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.batches import training_batches
from jaxtrain.errors import UserError
from jaxtrain.runner import training
from jaxtrain.runner.transfer import AHEAD, transfer_ahead

ROWS = {"x": np.arange(24, dtype=np.uint8)}


def loader(**settings):
    return training_batches(ROWS, 4, seed=3, **settings)


class Placing:
    """Places batches and counts them."""

    def __init__(self):
        self.batches, self.threads = [], set()

    def __call__(self, batch):
        self.batches.append(jax.device_put(batch))
        self.threads.add(threading.current_thread().name)
        return self.batches[-1]


def wait_until(condition):
    for _ in range(12_000):
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_the_next_batches_are_transferred_before_they_are_asked_for():
    place = Placing()
    batches, expected = transfer_ahead(loader(), place), loader()
    for done in range(1, 10):
        batch = next(batches)
        assert wait_until(lambda: len(place.batches) == done + AHEAD)  # noqa: B023
        assert batch.device is place.batches[done - 1]
        assert isinstance(batch.host["x"], np.ndarray)
        assert batch.device["x"].dtype == np.uint8
        assert np.array_equal(batch.host["x"], next(expected)["x"])
        assert np.array_equal(batch.device["x"], batch.host["x"])
        assert batches.state() == expected.state()
    batches.close()
    time.sleep(0.02)
    assert len(place.batches) == 9 + AHEAD
    assert place.threads == {"read ahead"}


def test_a_position_is_that_of_the_last_batch_returned():
    batches, expected = transfer_ahead(loader(), Placing()), loader()
    positions, values = [], []
    for _ in range(8):
        positions.append(batches.state())
        values.append(next(batches).host["x"].tolist())
    for at in (5, 0, 7):
        batches.restore(positions[at])
        expected.restore(positions[at])
        assert batches.state() == expected.state() == positions[at]
        assert next(batches).host["x"].tolist() == values[at] == next(expected)["x"].tolist()
    batches.restore({**positions[0], "next_batch": 3})  # skips batches, as a rollback does
    assert next(batches).host["x"].tolist() == values[3]
    with pytest.raises(UserError, match="batch_size"):
        batches.restore({**positions[0], "batch_size": 5})
    batches.close()
    assert next(batches).host["x"].tolist() == values[4]
    batches.close()


def test_a_failure_arrives_with_its_batch():
    read = loader()
    failing = iter([0, 0, 1, 0, 0, 0, 0])

    def place(batch):
        if next(failing):
            raise ValueError("no memory")
        return batch

    batches = transfer_ahead(read, place)
    first, second = next(batches), next(batches)
    with pytest.raises(ValueError, match="no memory"):
        next(batches)
    expected = loader()
    wanted = [next(expected)["x"].tolist() for _ in range(3)]
    assert [x.host["x"].tolist() for x in (first, second, next(batches))] == wanted
    batches.close()


def test_a_loader_of_the_callers_thread_is_not_read_ahead():
    place = Placing()
    batches = transfer_ahead(loader(prefetch=0), place)
    next(batches)
    time.sleep(0.02)
    assert len(place.batches) == 1
    assert place.threads == {threading.current_thread().name}


@dataclass(frozen=True, kw_only=True)
class Scaled(jt.Recipe):
    """A regression on uint8."""

    steps: int = 6
    batch_size: int = 4
    lr: float = 0.1
    save_every: int = 4
    log_every: int = 1

    def task(self):
        def loss_fn(params, batch, rng):
            return jt.Loss.of((params["w"] * batch["x"].astype(jnp.float32) / 255 - 1) ** 2), {}

        return jt.Task(init=lambda: {"w": jnp.zeros(())}, loss_fn=loss_fn, train=ROWS)

    def make_optimizer(self):
        return optax.sgd(self.lr, momentum=0.9)


@pytest.mark.parametrize("settings", [{}, {"mesh": "data=2,fsdp=2", "accumulate": 2, "batch_size": 8}])
def test_a_run_that_transfers_ahead_computes_the_same_bits(settings, tmp_path, monkeypatch):
    whole = jt.fit(Scaled(**settings), tmp_path / "whole", quiet=True)
    monkeypatch.setattr(training, "_has_own_memory", lambda devices: True)
    seen = []
    monkeypatch.setattr(
        jt.TrainStep, "placed", lambda self, *args: (seen.append(args[1]), self._call(self.jitted, *args))[1]
    )
    jt.fit(Scaled(**settings, steps=5), tmp_path / "ahead", quiet=True)
    ahead = jt.fit(Scaled(**settings), tmp_path / "ahead", resume=True, quiet=True)
    assert len(seen) == 6
    assert all(isinstance(batch["x"], jax.Array) and batch["x"].dtype == np.uint8 for batch in seen)
    assert ahead.state.params["w"] == whole.state.params["w"]
    assert [line.get("loss") for line in ahead.history] == [line.get("loss") for line in whole.history]
