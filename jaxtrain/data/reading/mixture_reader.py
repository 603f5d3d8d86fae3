"""Batches of a mixture: the rows of each are computed from its number."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.collate import Collator
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.sources import Batch, Rows
from jaxtrain.errors import UserError


class MixtureReader:
    """Reads batches of a mixture: batch `b` has the rows from `b * batch_size` on.

    The position is the number of the next row, the same in every process.

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
        examples = [len(source) for source in mixture.sources]
        self.order: dict[str, Any] = {
            "data": "mixture",
            "examples": examples,
            "weights": list(mixture.counts),
            "batch_size": batch_size,
            "seed": seed,
        }
        self._mixture, self._seed, self._collator = mixture, seed, collator
        self._batch_size = batch_size
        self._rows = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
        self._next_batch = 0

    def read(self) -> Batch:
        """Read the rows of the next batch.

        Raises:
          UserError: The examples do not form a batch, or a source cannot be read.
        """
        numbers = self._next_batch * self._batch_size + self._rows
        places = self._mixture.places(numbers, self._seed)
        examples = [
            self._mixture.sources[source][example]
            for source, example in zip(places.sources.tolist(), places.examples.tolist(), strict=True)
        ]
        batch = self._collator(examples, numbers.tolist())
        self._next_batch += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch read: the numbers of the next batch and of its first row."""
        return {"next_batch": self._next_batch, "place": self._next_batch * self._batch_size}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`."""
        self._next_batch = int(position["next_batch"])

    def close(self) -> None:
        """Do nothing: nothing is open."""
