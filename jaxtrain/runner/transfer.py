"""Batches on the devices ahead of the steps: a thread transfers the next ones while a step runs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtrain.data import Batch
from jaxtrain.data.batches import TrainingBatches

AHEAD = 2
"""Number of batches on the devices besides that of the current step."""

Place = Callable[[Batch], Any]
"""Places a batch on the devices; it may return before the transfer is complete."""


class TransferredBatch(NamedTuple):
    """A batch, and its copy on the devices."""

    host: Batch
    device: Any


def transfer_ahead(loader: TrainingBatches, place: Place) -> TrainingBatches:
    """Return a loader's batches as `TransferredBatch`, with its positions.

    Args:
      loader: The loader; one that reads in the thread of its caller is read when a batch is asked for, not ahead.
      place: Places a batch on the devices.
    """
    ahead = min(AHEAD, loader.prefetch)
    return TrainingBatches(_TransferredBatches(loader, place), ahead, len(loader.rows), loader.rows)


class _TransferredBatches:
    """Reads a loader's batches and starts their transfer."""

    threads = 1

    def __init__(self, loader: TrainingBatches, place: Place) -> None:
        self.order, self._loader, self._place = loader.order, loader, place

    def advance(self) -> Callable[[], Any]:
        batch = next(self._loader)
        return lambda: TransferredBatch(batch, self._place(batch))

    def position(self) -> dict[str, Any]:
        return self._loader.state()

    def restore(self, position: Mapping[str, Any]) -> None:
        self._loader.restore(position)

    def close(self) -> None:
        self._loader.close()
