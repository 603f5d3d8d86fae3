"""The batches of a run: how long each was waited for, and a warning when one does not arrive."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxtrain.data import Batch
from jaxtrain.data.batches import TrainingBatches
from jaxtrain.distributed import processes
from jaxtrain.profile import INPUT
from jaxtrain.runner.transfer import Place, TransferredBatch, transfer_ahead


class FetchedBatch(NamedTuple):
    """A batch that the loader handed out."""

    arrays: Batch
    next_batch: int
    """The loader's position after it."""
    wait_s: float = 0.0
    """Seconds that the loop waited for it."""
    device: Any = None
    """Its copy on the devices; None if the step transfers it."""


@dataclass(frozen=True)
class DispatchedStep:
    """A training step that was dispatched to the device; it may not be done yet."""

    step: int
    batch: FetchedBatch
    metrics: Mapping[str, jax.Array]


class Batches:
    """Iterates over the loader's batches; while entered, a thread warns of one that does not arrive.

    Args:
      loader: The loader.
      source: Names the data in the warning.
      stall_seconds: Warn once a batch has been waited for this long; 0 never warns.
      message: Prints one line.
      place: Places a batch on the devices, which is then done ahead of the steps; None leaves it to the step.
    """

    def __init__(
        self,
        loader: TrainingBatches,
        source: str,
        stall_seconds: float,
        message: Callable[[str], None],
        place: Place | None = None,
    ) -> None:
        self._source, self._limit, self._message = source, stall_seconds, message
        self._rows = loader.rows
        self._loader = loader if place is None else transfer_ahead(loader, place)
        self._next_batch = loader.state()["next_batch"]
        self._waiting_since: float | None = None
        self._ended = threading.Event()
        # One thread per run: a timer per batch would cost more than most batches.
        self._thread = threading.Thread(target=self._watch, name="stalled input", daemon=True)

    def __enter__(self) -> "Batches":
        if self._limit:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()
        self._ended.set()
        if self._limit:
            self._thread.join()

    def __next__(self) -> FetchedBatch:
        begin = self._waiting_since = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(INPUT):
                batch: Any = next(self._loader)
        finally:
            self._waiting_since = None
        wait_s = time.perf_counter() - begin
        self._next_batch += 1
        arrays, on_devices = batch if isinstance(batch, TransferredBatch) else (batch, None)
        return FetchedBatch(arrays, self._next_batch, wait_s, on_devices)

    def gather(self, batch: Batch) -> Batch:
        """Return the whole batch of all processes, each of which holds some of its rows."""
        if processes.count() == 1:
            return batch
        rows, parts = process_allgather((self._rows, batch), tiled=True)
        _, first = np.unique(rows, return_index=True)  # several processes may hold the same row
        return {name: x[first] for name, x in parts.items()}

    def state(self) -> dict[str, Any]:
        """Return the loader's position, as JSON."""
        return self._loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`.

        Raises:
          UserError: The position belongs to other data.
        """
        self._loader.restore(state)
        self._next_batch = state["next_batch"]

    def _watch(self) -> None:
        warned = None
        while not self._ended.wait(self._limit / 10):
            since = self._waiting_since
            if since is not None and since != warned and time.perf_counter() - since >= self._limit:
                warned = since
                self._message(
                    f"batch {self._next_batch} of {self._source} has not arrived for {self._limit:g} s: still waiting; "
                    "check its disk or network"
                )
