"""A run's batches, how long each was waited for, and word of one that does not come."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxtrain.data.loader import Batch, Loader
from jaxtrain.distributed import processes
from jaxtrain.profile import INPUT


class Batches:
    """The loader's batches, within a `with`; after `stall_seconds` of waiting for one `say` is told, once a batch.

    `next_batch`: the position after the last one handed out. `waited`: seconds it was waited for. With 0
    `stall_seconds` nothing is said.
    """

    def __init__(self, loader: Loader, source: str, stall_seconds: float, say: Callable[[str], None]) -> None:
        self.next_batch = loader.state()["next_batch"]
        self.waited = 0.0
        self._loader, self._source, self._limit, self._say = loader, source, stall_seconds, say
        self._since: float | None = None
        self._ended = threading.Event()
        # One thread for all of a run: a timer a batch would cost more than most batches do.
        self._thread = threading.Thread(target=self._watch, name="stalled input", daemon=True)

    def __enter__(self) -> "Batches":
        if self._limit:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._limit:
            self._thread.join()

    def __next__(self) -> Batch:
        begin = self._since = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(INPUT):
                batch = next(self._loader)
        finally:
            self._since = None
        self.waited = time.perf_counter() - begin
        self.next_batch += 1
        return batch

    def whole(self, batch: Batch) -> Batch:
        """The batch that one handed out is part of, of several processes each of which gives its own."""
        if processes.count() == 1:
            return batch
        rows, given = process_allgather((self._loader.rows, batch), tiled=True)
        _, first = np.unique(rows, return_index=True)  # of those that several hold, one
        return {name: x[first] for name, x in given.items()}

    def state(self) -> dict[str, Any]:
        """The loader's position."""
        return self._loader.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises `UserError` where it is of other data."""
        self._loader.restore(state)
        self.next_batch = state["next_batch"]

    def _watch(self) -> None:
        told = None
        while not self._ended.wait(self._limit / 10):
            since = self._since
            if since is not None and since != told and time.perf_counter() - since >= self._limit:
                told = since
                self._say(
                    f"batch {self.next_batch} of {self._source} has not come for {self._limit:g} s: still waiting; "
                    "is its disk or network down?"
                )
