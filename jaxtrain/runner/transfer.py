"""Batches on the devices ahead of the steps: a thread transfers the next ones while a step runs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtrain.data import Batch
from jaxtrain.data.batches import ReadAhead, TrainingBatches

AHEAD = 2
"""Number of batches on the devices besides that of the current step."""

Place = Callable[[Batch], Any]
"""Places a batch on the devices; it may return before the transfer is complete."""


class TransferredBatch(NamedTuple):
    """A batch, and its copy on the devices."""

    host: Batch
    device: Any


class TransferAhead:
    """Endless iterator of a loader's batches, with its positions.

    Args:
      loader: The loader; one that reads in the thread of its caller is read when a batch is asked for, not ahead.
      place: Places a batch on the devices.
    """

    def __init__(self, loader: TrainingBatches, place: Place) -> None:
        self._loader, self._place = loader, place
        self._start()

    def __next__(self) -> TransferredBatch:
        batch: Mapping[str, Any] = next(self._ahead)
        return TransferredBatch(batch["host"], batch["device"])

    def state(self) -> dict[str, Any]:
        """Return the loader's position after the last batch returned."""
        place: dict[str, Any] = self._ahead.state()["place"]
        return place

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises as that of the loader."""
        self._ahead.close()
        self._loader.restore(state)
        self._start()

    def close(self) -> None:
        """Stop the thread and close the loader."""
        self._ahead.close()

    def _start(self) -> None:
        rows = self._loader.rows
        self._ahead = ReadAhead(_Reader(self._loader, self._place), min(AHEAD, self._loader.prefetch), len(rows), rows)


class _Reader:
    """Reads a loader's batches and starts their transfer."""

    order: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, loader: TrainingBatches, place: Place) -> None:
        self._loader, self._place = loader, place

    def read(self) -> dict[str, Any]:
        batch = next(self._loader)
        return {"host": batch, "device": self._place(batch)}

    def position(self) -> dict[str, Any]:
        state = self._loader.state()
        return {"next_batch": state["next_batch"], "place": state}

    def restore(self, position: Mapping[str, Any]) -> None:
        self._loader.restore(position["place"])

    def close(self) -> None:
        self._loader.close()
