"""The smaller last batch of a DataLoader's epoch is trained on, as in a PyTorch loop."""

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
from jaxtrain.data.batches import training_batches
from jaxtrain.data.torch_loader import RandomStates

KEYS = ("x", "y")


def dataset(examples):
    rng = np.random.default_rng(examples)
    return TensorDataset(torch.tensor(rng.normal(size=(examples, 3))), torch.tensor(rng.normal(size=examples)))


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("examples", "batch_size", "accumulate"), [(7, 3, 1), (10, 8, 2), (9, 4, 1), (14, 9, 1), (21, 12, 3), (11, 8, 1)]
)
def test_every_update_equals_pytorchs_in_float64(examples, batch_size, accumulate):
    loader, steps = DataLoader(dataset(examples), batch_size, shuffle=True), 7
    expected = torch_losses_and_weights(loader, 3, steps, accumulate)
    with jax.enable_x64(True):
        batches = training_batches(loader, batch_size, seed=3, batch_keys=KEYS)
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
    """A run on a DataLoader that does not drop its last batch."""

    examples: int = 10
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
            train=DataLoader(dataset(self.examples), self.batch_size, shuffle=True),
            batch_keys=KEYS,
        )

    def make_optimizer(self):
        return optax.sgd(0.5, momentum=0.9)


def test_a_run_trains_on_every_example_and_resumes_to_the_bit(tmp_path, capsys):
    weights = []

    def interrupt(step, metrics, state):
        if step == 5:
            signal.raise_signal(signal.SIGINT)

    def record(step, metrics, state):
        weights.append(metrics["weight"])

    whole = jt.fit(Shorter(accumulate=2), tmp_path / "whole", on_step=record)
    assert [int(weight) for weight in weights] == 3 * [4, 4, 2]
    line = "batch 2 of epoch 0 of the DataLoader has 2 rows, not 4: the step is compiled for them too"
    assert " ".join(capsys.readouterr().out.split()).count(line) == 1
    # In the middle of an epoch, before a smaller batch.
    assert jt.fit(Shorter(accumulate=2), tmp_path / "parts", quiet=True, on_step=interrupt).exit_status == 130
    resumed = jt.fit(Shorter(accumulate=2), tmp_path / "parts", quiet=True, resume=True)
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])
    losses, expected = ([line.get("loss") for line in run.history] for run in (resumed, whole))
    assert losses == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 4}, "the last batch of the DataLoader has 2 rows, which accumulate 4 does not divide: give it"),
        ({"mesh": "data=4"}, "the last batch of the DataLoader has 2 rows, not 4, which a mesh does not divide: give"),
    ],
)
def test_a_smaller_batch_that_cannot_be_divided_is_refused_before_the_run(settings, message, tmp_path):
    with pytest.raises(jt.UserError, match=message):
        jt.fit(Shorter(**settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
