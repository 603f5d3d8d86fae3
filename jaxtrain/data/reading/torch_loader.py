"""Batches of a `torch.utils.data.DataLoader`, in an order that can be resumed."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.data.collate import Collator, check_rows
from jaxtrain.data.reading.smaller_batches import SmallerBatches
from jaxtrain.data.reading.stream import set_epoch
from jaxtrain.data.sources import Batch, Rows
from jaxtrain.errors import UserError


def is_torch(data: Any, name: str) -> bool:
    """Return whether data is of a class of `torch.utils.data`, without importing torch.

    Args:
      data: Any object.
      name: Name of the class.

    Example:
      >>> is_torch([], "DataLoader")
      False
    """
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, getattr(module, name))


class DataLoaderReader:
    """Reads the batches of a DataLoader, epoch after epoch, with its workers and its `collate_fn`.

    The order and the transforms depend on `seed` and the epoch only: while the loader is used, the global generators of
    PyTorch, NumPy and Python and the generators of the loader and its samplers have states of their own, derived from
    these; then they get their states back. A sampler with `set_epoch` is given the number of each epoch.

    The position is the number of batches. Restoring it reads the batches of the epoch before it again. The random
    numbers of workers with `persistent_workers=True` continue from epoch to epoch, which restoring does not reproduce.

    Args:
      loader: The DataLoader.
      batch_size: Its number of rows of a batch.
      accumulate: Number of micro-batches that a batch is divided into.
      seed: Seed of the order.
      rows: Row numbers of a batch to return; None for all.
      collator: Names the arrays of a batch.
      message: Prints one line.

    Raises:
      UserError: The batch size of the loader differs, or its last batch is smaller than the others and `rows` are
        given.
    """

    threads = 0

    def __init__(
        self,
        loader: Any,
        batch_size: int,
        accumulate: int,
        seed: int,
        rows: Rows | None,
        collator: Collator,
        message: Callable[[str], None],
    ) -> None:
        _check_batches(loader, batch_size, rows)
        self.order: dict[str, Any] = {"data": "DataLoader", "batch_size": batch_size, "seed": seed}
        self._loader, self._batch_size, self._seed, self._collator = loader, batch_size, seed, collator
        self._rows, self._message = rows if rows is None else np.asarray(rows, np.intp), message
        self._next_batch = self._epoch = 0
        self._batches = 0  # read of the epoch
        self._random = RandomStates(loader)
        self._iterator: Iterator[Any] | None = None
        self._smaller = SmallerBatches(batch_size, accumulate, rows is not None, message)

    def advance(self) -> Callable[[], Batch]:
        """Read the next batch; the last one of an epoch may have fewer rows.

        Raises:
          UserError: The loader is empty, the batch has more rows or differing numbers of them, or its values are not
            arrays.
        """
        while True:
            values = self._next()
            where = f"batch {self._batches - 1} of epoch {self._epoch} of the DataLoader"
            batch = self._collator.batch(values, where)
            count = self._rows_of(batch, where)
            if count == self._batch_size or self._smaller.keeps(count, where):
                self._next_batch += 1
                return lambda: batch if self._rows is None else {name: x[self._rows] for name, x in batch.items()}
            if self._batches == 1:
                raise UserError(f"{where} has {count} rows, and none has {self._batch_size}: use a smaller batch_size")

    def _rows_of(self, batch: Batch, where: str) -> int:
        """Return the number of rows of a batch, of which all arrays must have as many."""
        first = next(iter(batch.values()))
        count = len(first) if first.ndim and 0 < len(first) < self._batch_size else self._batch_size
        for name, array in batch.items():
            if not array.ndim:
                raise UserError(f"{name!r} of {where} is a scalar: give the DataLoader batch_size={self._batch_size}")
            if len(array) != count:
                raise UserError(
                    f"{name!r} of {where} has {len(array)} rows, not {count}: give the DataLoader batches of one size"
                )
        return count

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch read, as JSON."""
        place = {"at": self._next_batch, "epoch": self._epoch, "batches": self._batches}
        return {"next_batch": self._next_batch, "place": place}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`."""
        place = position["place"]
        count = position["next_batch"] - place["at"] + place["batches"]
        if count:
            self._message(f"reading {count} batches of the DataLoader again, up to where the run was saved")
        self._open(place["epoch"])
        for _ in range(place["batches"]):
            self._next()
        self._next_batch = place["at"]
        while self._next_batch < position["next_batch"]:
            self.advance()

    def close(self) -> None:
        """Release the loader's workers."""
        self._iterator = None

    def _next(self) -> Any:
        """Return the next batch of this epoch, or the first one of the next epoch."""
        if self._iterator is None:
            self._open(self._epoch)
        batch = self._advance()
        if batch is _END and self._batches:
            self._open(self._epoch + 1)
            batch = self._advance()
        if batch is _END:
            raise UserError("the DataLoader has no batch: give it at least batch_size examples")
        self._batches += 1
        return batch

    def _advance(self) -> Any:
        assert self._iterator is not None
        with self._random:
            return next(self._iterator, _END)

    def _open(self, epoch: int) -> None:
        begin_epoch(self._loader, epoch)
        self._random.seed(self._seed, epoch)
        with self._random:
            self._iterator = iter(self._loader)
        self._epoch, self._batches = epoch, 0


def begin_epoch(loader: Any, epoch: int) -> None:
    """Give the parts of a DataLoader the number of an epoch.

    Args:
      loader: The DataLoader.
      epoch: The number.
    """
    for part in _parts(loader):
        set_epoch(part, epoch)


class RandomStates:
    """Own states of the global random generators and of those of a DataLoader, in effect while entered.

    Args:
      loader: The DataLoader.
    """

    def __init__(self, loader: Any) -> None:
        self._torch = sys.modules["torch"]
        named = (getattr(part, "generator", None) for part in (loader, *_parts(loader)))
        generators = [self._torch.default_generator, *(g for g in named if isinstance(g, self._torch.Generator))]
        self._generators = list({id(g): g for g in generators}.values())
        self._own: list[Any] = []
        self.seed(0, 0)

    def seed(self, seed: int, epoch: int) -> None:
        """Set the own states to those of an epoch."""
        seeds = np.random.SeedSequence((seed, epoch)).generate_state(len(self._generators) + 2).tolist()
        self._own = [
            random.Random(seeds.pop()).getstate(),
            np.random.RandomState(seeds.pop()).get_state(),
            *(self._torch.Generator().manual_seed(number).get_state() for number in seeds),
        ]

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: Any) -> None:
        self._exchange()

    def _exchange(self) -> None:
        own = self._own
        self._own = [random.getstate(), np.random.get_state(), *(g.get_state() for g in self._generators)]
        random.setstate(own[0])
        np.random.set_state(own[1])
        for generator, state in zip(self._generators, own[2:], strict=True):
            generator.set_state(state)


def loader_examples(loader: Any, collator: Collator) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a DataLoader's batches once, with the global random generators as they were.

    Args:
      loader: The DataLoader, with any batch size.
      collator: Names the arrays of a batch.

    Returns:
      An iterator of examples.

    Raises:
      UserError: The values of a batch are not arrays, or differ in their number of rows.
    """
    states = RandomStates(loader)
    with states:
        batches = iter(loader)
    number = 0
    while True:
        with states:
            values = next(batches, _END)
        if values is _END:
            return
        batch = collator.batch(values, f"batch {number} of the DataLoader")
        check_rows(batch, len(next(iter(batch.values()))), f"batch {number} of the DataLoader")
        for row in zip(*batch.values(), strict=True):
            yield dict(zip(batch, row, strict=True))
        number += 1


def last_rows(loader: Any, batch_size: int) -> int | None:
    """Return the number of rows of the last batch of an epoch.

    Args:
      loader: The DataLoader.
      batch_size: Its number of rows of a batch.

    Returns:
      A number up to `batch_size`; None if it is not known before the batches are read.
    """
    batches = loader.batch_sampler
    if getattr(batches, "drop_last", False):
        return batch_size
    if not hasattr(batches, "drop_last"):
        return None  # a batch sampler of the user's
    try:
        return len(batches.sampler) % batch_size or batch_size
    except TypeError:
        return None  # a dataset without a length


def _parts(loader: Any) -> list[Any]:
    """Return what may have a random generator, or differ from epoch to epoch."""
    batches = loader.batch_sampler
    parts = (loader.dataset, loader.sampler, batches, getattr(batches, "sampler", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _check_batches(loader: Any, batch_size: int, rows: Rows | None) -> None:
    """Check what is known of the batches before they are read."""
    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if size not in (None, batch_size):
        raise UserError(f"the DataLoader has batch_size {size}, but the run has {batch_size}: give both the same")
    last = last_rows(loader, batch_size)
    if last is not None and last < batch_size and rows is not None:
        raise UserError(
            f"the last batch of the DataLoader has {last} rows, not {batch_size}, and a mesh takes whole batches: give"
            " it drop_last=True"
        )


_END = object()
