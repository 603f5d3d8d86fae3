"""The smaller last batch of an epoch of a DataLoader or a stream is trained on, as in a PyTorch loop."""

import signal
from dataclasses import dataclass
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.data.batches import training_batches
from jaxtrain.data.reading.torch_loader import RandomStates

KEYS = ("x", "y")


def dataset(examples):
    rng = np.random.default_rng(examples)
    return TensorDataset(torch.tensor(rng.normal(size=(examples, 3))), torch.tensor(rng.normal(size=examples)))


class Stream:
    """A stream of which each epoch has one example more than the one before it."""

    def __init__(self, examples):
        self.examples, self.length = examples, examples

    def set_epoch(self, epoch):
        self.length = self.examples + epoch

    def __iter__(self):
        return zip(*dataset(self.length)[:], strict=True)


def loss_fn(params, batch, rng):
    return jt.Loss.of((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2), {}


def torch_losses_and_weights(loader, seed, steps, accumulate):
    """Train in PyTorch; return the loss of each update and the weights after it."""
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.9)
    done = []

    def batches():
        for epoch in range(steps):
            states = RandomStates(loader)
            states.seed(seed, epoch)
            with states:
                yield from list(loader)

    for x, y in islice(batches(), steps):
        optimizer.zero_grad()
        mean = 0
        for some_x, some_y in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = ((torch.tanh(some_x @ w) - some_y) ** 2).mean() / accumulate
            loss.backward()
            mean += loss.item()
        optimizer.step()
        done.append((mean, w.detach().numpy().copy()))
    return done


@pytest.mark.parametrize(
    ("examples", "batch_size", "accumulate", "is_stream"),
    [(7, 3, 1, False), (10, 8, 2, True), (10, 8, 2, False), (9, 4, 1, True), (14, 9, 1, False), (21, 12, 3, True)],
)
def test_every_update_equals_pytorchs_in_float64(examples, batch_size, accumulate, is_stream):
    loader, steps = DataLoader(dataset(examples), batch_size, shuffle=not is_stream), 7
    expected = torch_losses_and_weights(loader, 3, steps, accumulate)
    data = (lambda: zip(*dataset(examples)[:], strict=True)) if is_stream else loader
    with jax.enable_x64(True):
        # Without a thread, in which x64 would not be enabled.
        batches = training_batches(data, batch_size, seed=3, prefetch=0, accumulate=accumulate, batch_keys=KEYS)
        step = jt.train_step(
            loss_fn, optax.sgd(0.5, momentum=0.9), precision="fp64", accumulate=accumulate, allow_recompile=1
        )
        state = step.init({"w": jnp.zeros(3, jnp.float64)})
        sizes = set()
        for loss, w in expected:
            batch = next(batches)
            sizes.add(len(batch["x"]))
            state, metrics = step(state, batch)
            np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-13)
            np.testing.assert_allclose(state.params["w"], w, rtol=1e-12, atol=1e-15)
    assert sizes == {batch_size, examples % batch_size}


@dataclass(frozen=True, kw_only=True)
class Shorter(jt.Recipe):
    """A run on data whose last batch of an epoch is smaller."""

    examples: int = 10
    is_stream: bool = False
    steps: int = 9
    batch_size: int = 4
    schedule: str = "constant"
    log_every: int = 1
    eval_every: int = 9
    save_every: int = 9

    def task(self):
        return jt.Task(
            init=lambda: {"w": jnp.zeros(3)},
            loss_fn=loss_fn,
            train=Stream(self.examples)
            if self.is_stream
            else DataLoader(dataset(self.examples), self.batch_size, True),
            batch_keys=KEYS,
        )

    def make_optimizer(self):
        return optax.sgd(0.5, momentum=0.9)


STREAM_SIZES = [4, 4, 1, 4, 4, 2, 4, 4, 3]


@pytest.mark.parametrize(
    ("settings", "stop", "sizes", "line"),
    [
        (  # stopped in the middle of an epoch, before a smaller batch
            {"accumulate": 2},
            5,
            3 * [4, 4, 2],
            "batch 2 of epoch 0 of the DataLoader has 2 rows, not 4: the step is compiled for them too",
        ),
        (  # stopped after a smaller batch, at the end of an epoch
            {"is_stream": True, "examples": 9},
            6,
            STREAM_SIZES,
            "the last batch of epoch 1 of the stream has 2 rows, not 4: the step is compiled for them too",
        ),
        (
            {"is_stream": True, "examples": 9, "accumulate": 2},
            2,
            [4, 4, 4, 4, 2, 4, 4, 4, 4],
            "epoch 2 of the stream has 3 rows, not 4, which accumulate 2 does not divide: it is dropped",
        ),
    ],
    ids=["DataLoader", "stream", "stream with accumulate"],
)
def test_a_run_trains_on_every_example_and_resumes_to_the_bit(settings, stop, sizes, line, tmp_path, capsys):
    weights = []

    def interrupt(step, metrics, state):
        if step == stop:
            signal.raise_signal(signal.SIGINT)

    def record(step, metrics, state):
        weights.append(metrics["weight"])

    recipe = Shorter(**settings)
    whole = jt.fit(recipe, tmp_path / "whole", on_step=record)
    assert [int(weight) for weight in weights] == sizes
    assert " ".join(capsys.readouterr().out.split()).count(line) == 1
    assert jt.fit(recipe, tmp_path / "parts", quiet=True, on_step=interrupt).exit_status == 130
    resumed = jt.fit(recipe, tmp_path / "parts", quiet=True, resume=True)
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])
    losses, expected = ([line.get("loss") for line in run.history] for run in (resumed, whole))
    assert losses == expected
    assert main(["replay", str(whole.run.path), "9"]) == 0
    assert f"{whole.history[-1]['loss']:.7g} in fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 4}, "the last batch of the DataLoader has 2 rows, which accumulate 4 does not divide: give it"),
        (
            {"mesh": "data=4"},
            "the last batch of the DataLoader has 2 rows, not 4, and a mesh takes whole batches: give",
        ),
    ],
)
def test_a_smaller_batch_that_cannot_be_divided_is_refused_before_the_run(settings, message, tmp_path):
    with pytest.raises(jt.UserError, match=message):
        jt.fit(Shorter(**settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
