"""Measure now and then what the precision of a run loses, and print advice."""

import time
from collections.abc import Callable

import jax

from jaxtrain.runner.fetched_batches import FetchedBatch
from jaxtrain.runner.interval import Interval
from jaxtrain.runner.training import Training
from jaxtrain.step import PrecisionLosses, TrainState, precision_losses


class PrecisionWatch:
    """Measures the first of every n updates, if the recipe asks for it.

    Args:
      training: The parts of the run.
      interval: The interval, from whose time measurements are excluded.
      message: Prints one line.
    """

    def __init__(self, training: Training, interval: Interval, message: Callable[[str], None]) -> None:
        self._every, self._interval, self._message = training.recipe.watch_precision, interval, message
        self._measurement = precision_losses(training.step) if self._every else None
        self._printed: set[str] = set()

    def measure(self, step: int, state: TrainState, batch: FetchedBatch) -> PrecisionLosses | None:
        """Return what the update of a step is about to lose; None for one that is not measured."""
        if self._measurement is None or (step - 1) % self._every:
            return None
        jax.block_until_ready(state)
        since = time.perf_counter()
        if batch.device is None:
            losses = self._measurement(state, batch.arrays)
        else:
            losses = self._measurement.placed(state, batch.device)
        self._interval.exclude(time.perf_counter() - since)
        advice = losses.advice_by_kind()
        for line in [advice[about] for about in advice if about not in self._printed]:
            self._message(f"step {step}: {line}")
        self._printed |= advice.keys()  # once for each layer and kind of values
        return losses
