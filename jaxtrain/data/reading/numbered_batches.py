"""Batches of data whose examples are read by number: any thread reads any batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.data.collate import Collator
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.sources import Batch, Rows
from jaxtrain.errors import UserError


class NumberedBatches:
    """Reads batches by a function of their number; the position is that of the next one.

    Args:
      order: What determines the order of the examples, by name.
      read: Function of the number of a batch that returns the batch.
      threads: Number of threads that may read at once.
    """

    def __init__(self, order: dict[str, Any], read: Callable[[int], Batch], threads: int) -> None:
        self.order, self.threads, self._read = order, threads, read
        self._next_batch = 0

    def advance(self) -> Callable[[], Batch]:
        """Return what reads the next batch.

        Raises:
          UserError: As what it returns: the examples do not form a batch, or cannot be read.
        """
        self._next_batch += 1
        return partial(self._read, self._next_batch - 1)

    def position(self) -> dict[str, Any]:
        """Return the number of the next batch."""
        return {"next_batch": self._next_batch}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`."""
        self._next_batch = int(position["next_batch"])

    def close(self) -> None:
        """Do nothing: nothing is open."""


class MixtureBatches(NumberedBatches):
    """Reads batches of a mixture: batch `b` has the rows from `b * batch_size` on, the same in every process.

    Args:
      mixture: The mixture.
      batch_size: Number of rows of a batch.
      seed: Seed of the order, at least 0.
      rows: Row numbers of a batch to read; None for all.
      collator: Makes batches of examples.

    Raises:
      UserError: The seed is negative.
    """

    def __init__(self, mixture: Mixture, batch_size: int, seed: int, rows: Rows | None, collator: Collator) -> None:
        if seed < 0:
            raise UserError(f"the data seed must be at least 0, got {seed}")
        order = {
            "data": "mixture",
            "examples": [len(source) for source in mixture.sources],
            "weights": list(mixture.counts),
            "batch_size": batch_size,
            "seed": seed,
        }
        self._batch_size = batch_size
        row_numbers = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)

        def read(number: int) -> Batch:
            numbers = number * batch_size + row_numbers
            places = mixture.places(numbers, seed)
            examples = [
                mixture.sources[source][example]
                for source, example in zip(places.sources.tolist(), places.examples.tolist(), strict=True)
            ]
            return collator(examples, numbers.tolist())

        super().__init__(order, read, threads=1)

    def position(self) -> dict[str, Any]:
        """Return the numbers of the next batch and of its first row."""
        return {"next_batch": self._next_batch, "place": self._next_batch * self._batch_size}
