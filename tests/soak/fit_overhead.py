"""Measure the overhead of `jaxtrain.fit` over a bare loop of steps: `python -m tests.soak.fit_overhead [ROUNDS]`.

Both run the same program on batches of the same arrays: `fit` logs every 10 steps and checks every step; it neither
evaluates nor saves between the first and the last step. The first steps, beside which the initial state is saved in the
background, are left out. The rounds alternate, and the lower deciles of the time of a step are compared, because other
load only adds to them; so are the steps of a small model, whose difference is the time that the loop itself takes.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.data.batches import training_batches
from jaxtrain.runner import training_step

STEPS, SETTLED = 400, 150


@dataclass(frozen=True, kw_only=True)
class Products(jt.Recipe):
    """A chain of matrix products; with the default width it takes about 10 ms a step on two cores."""

    width: int = 704
    steps: int = STEPS
    batch_size: int = 64
    save_every: int = 10 * STEPS
    eval_every: int = 10 * STEPS

    def task(self) -> jt.Task:
        def init() -> dict[str, jax.Array]:
            return {
                f"w{i}": jax.random.normal(jax.random.key(i), (self.width, self.width)) / self.width**0.5
                for i in range(6)
            }

        def loss_fn(params: dict, batch: dict, rng: jax.Array) -> tuple[jt.Loss, dict]:
            x = batch["x"]
            for w in params.values():
                x = jnp.tanh(x @ w)
            return jt.Loss.of((x**2).mean(-1)), {}

        data = {"x": np.random.default_rng(0).normal(size=(1024, self.width)).astype(np.float32)}
        return jt.Task(init=init, loss_fn=loss_fn, train=data)


def bare(recipe: Products) -> list[float]:
    """Return the seconds of each step of a loop that reads a batch and calls the step, one step ahead of the device."""
    task = recipe.task()
    step = training_step(recipe, task)
    state = step.init(task.params, seed=0)
    batches = training_batches(task.train, recipe.batch_size, 0)
    times, last = [], None
    for _ in range(recipe.steps):
        state, metrics = step(state, next(batches))
        if last is not None:
            last.block_until_ready()
        last = metrics["loss"]
        times.append(time.perf_counter())
    batches.close()
    return np.diff(times).tolist()


def fitted(recipe: Products, folder: Path) -> list[float]:
    """Return the seconds between the steps of `fit`."""
    times: list[float] = []
    jt.fit(recipe, folder, quiet=True, on_step=lambda step, metrics, state: times.append(time.perf_counter()))
    return np.diff(times).tolist()


def lower_deciles(width: int, rounds: int) -> tuple[float, float]:
    """Return the lower decile of the milliseconds of a step in the bare loop and in `fit`."""
    own, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            own += bare(Products(width=width))[SETTLED:]
            ours += fitted(Products(width=width), Path(folder, str(number)))[SETTLED:]
    return tuple(float(np.quantile(times, 0.1)) * 1e3 for times in (own, ours))


def main(rounds: int) -> None:
    """Print the overhead, measured and as the time of the loop itself."""
    loop, fit = lower_deciles(Products.width, rounds)
    print(f"lower decile of a step: loop {loop:.3f} ms, fit {fit:.3f} ms: {fit / loop - 1:+.2%}")
    small_loop, small_fit = lower_deciles(32, rounds)
    own = small_fit - small_loop
    print(f"of a small model: loop {small_loop:.3f} ms, fit {small_fit:.3f} ms: {own / 10:+.2%} of a step of 10 ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
