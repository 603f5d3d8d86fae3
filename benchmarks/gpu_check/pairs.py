"""A training step beside a variant of it, in turns, in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.engines import prediction
from benchmarks.figures import median_interval
from benchmarks.job import Job
from benchmarks.timing import TURN, TURN_S
from benchmarks.worker import WARM_UP, time_steps
from benchmarks.workloads import WORKLOADS
from jaxtrain.step import TrainState, TrainStep
from parity.sides import jax_side, torch_side

ROUNDS = 6
GPT2 = {False: {}, True: {"vocab_size": 64, "width": 32, "depth": 2, "heads": 2, "rows": 4, "length": 16}}
"""Sizes of GPT-2 124M by whether it is a rehearsal."""


@dataclass
class Variant:
    """A compiled step with its state.

    Attributes:
      step: Runs a step and waits for it.
      losses: The losses so far.
      predicted: As in `benchmarks.engines.Engine`.
      prepare: Called before each step.
    """

    step: Callable[[], None]
    losses: list[float]
    predicted: Mapping[str, Any]
    prepare: Callable[[], None] = lambda: None


class Steps:
    """Steps of a workload, all from the same weights on the same batch.

    Args:
      workload: Name of the workload.
      sizes: Overrides of its sizes.
    """

    def __init__(self, workload: str, sizes: Mapping[str, int]) -> None:
        self.case = WORKLOADS[workload].case(sizes)
        self.job = Job(workload, "jax", "bf16", feature="loop", sizes=sizes)
        self.batch = self.case.batch(0, self.case.rows)
        weights = jax_side.from_torch(self.case, torch_side.initial_weights(self.case, seed=0))
        self.weights = jax.device_get(weights)  # a state takes copies, which it overwrites

    def variant(self, step: TrainStep, precision: str = "bf16") -> Variant:
        """Compile a step and run its first steps."""
        params, model_state = self.weights
        state = step.init(params, model_state=model_state)
        arrays = jax_side.arrays(self.batch, precision)
        compiled = step.jitted.lower(state, arrays).compile()
        losses: list[float] = []

        def run_step() -> None:
            nonlocal state
            state, metrics = compiled(state, arrays)
            jax.block_until_ready(state)
            losses.append(float(metrics["loss"]))

        found = Variant(run_step, losses, prediction(compiled))
        time_steps(found, WARM_UP, 0.0)
        return found

    def states(self, step: TrainStep, steps: int) -> list[dict[str, Any]]:
        """Return the metrics of some steps."""
        params, model_state = self.weights
        state: TrainState = step.init(params, model_state=model_state)
        found = []
        for _ in range(steps):
            state, metrics = step(state, jax_side.arrays(self.batch, "fp16"))
            found.append(jax.device_get(metrics))
        return found


def beside(base: Variant, other: Variant) -> dict[str, Any]:
    """Time a variant in turns with another one.

    Returns:
      Median seconds of a step of both, and the variant's time as a share of the other's, with an interval.
    """
    turns: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for variant, seconds in zip((base, other), turns, strict=True):
            seconds.append(float(np.median(time_steps(variant, TURN, TURN_S)["wall"])))
    shares = np.array(turns[1]) / np.array(turns[0])
    return {
        "step_s": float(np.median(turns[1])),
        "base_s": float(np.median(turns[0])),
        "of_base": float(np.median(shares)),
        "interval": median_interval(shares),
    }
