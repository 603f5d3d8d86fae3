"""Measure the overhead of `jaxtrain.fit` over a bare loop of steps: `python -m tests.soak.fit_overhead [ROUNDS]`.

Both run the same program on batches of the same arrays: `fit` logs every 10 steps and checks every step; it neither
evaluates nor saves between the first and the last step. The rounds
alternate, and the lower deciles of the time of a step are compared, because other load only adds to them.
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

STEPS, SIZE = 200, 704


@dataclass(frozen=True, kw_only=True)
class Products(jt.Recipe):
    """A chain of matrix products that takes about 10 ms a step on two cores."""

    steps: int = STEPS
    batch_size: int = 64
    save_every: int = 10 * STEPS
    eval_every: int = 10 * STEPS

    def task(self) -> jt.Task:
        def init() -> dict[str, jax.Array]:
            return {f"w{i}": jax.random.normal(jax.random.key(i), (SIZE, SIZE)) / SIZE**0.5 for i in range(6)}

        def loss_fn(params: dict, batch: dict, rng: jax.Array) -> tuple[jt.Loss, dict]:
            x = batch["x"]
            for w in params.values():
                x = jnp.tanh(x @ w)
            return jt.Loss.of((x**2).mean(-1)), {}

        data = {"x": np.random.default_rng(0).normal(size=(1024, SIZE)).astype(np.float32)}
        return jt.Task(init=init, loss_fn=loss_fn, train=data)


def bare(recipe: Products) -> list[float]:
    """Return the seconds of each step of a loop that reads a batch and calls the step, one step ahead of the device."""
    task = recipe.task()
    step = training_step(recipe, task.loss_fn)
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


def main(rounds: int) -> None:
    own, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            own += bare(Products())[10:]
            ours += fitted(Products(), Path(folder, str(number)))[10:]
    low = [float(np.quantile(times, 0.1)) * 1e3 for times in (own, ours)]
    mean = [float(np.mean(np.sort(times)[: len(times) // 2])) * 1e3 for times in (own, ours)]
    print(f"lower decile of a step: loop {low[0]:.3f} ms, fit {low[1]:.3f} ms: {low[1] / low[0] - 1:+.2%}")
    print(f"mean of the faster half: loop {mean[0]:.3f} ms, fit {mean[1]:.3f} ms: {mean[1] / mean[0] - 1:+.2%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
