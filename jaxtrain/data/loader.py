"""Batches of a source: endless and resumable for training, one ordered pass for evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.source import Example, Source
from jaxtrain.errors import UserError

Batch = dict[str, NDArray[Any]]  # name -> [batch_size, ...]
Rows = Sequence[int] | NDArray[np.intp]  # row numbers in a batch


class Loader:
    """Endless iterator of batches, prefetched in the background.

    Every epoch is a new permutation of the source, divided into batches of exactly `batch_size`; the remainder is
    dropped. The order depends on `seed` only, not on threads.

    Args:
      source: Source of examples.
      batch_size: Number of rows of a batch.
      seed: Seed of the permutations, at least 0.
      shuffle: Whether to permute the examples; otherwise they keep the order of the source.
      num_threads: Number of threads that read.
      prefetch: Number of batches to read ahead.
      rows: Row numbers of a batch to read, as one of several processes needs them; None for all. The position of the
        loader is that of the whole batches.

    Raises:
      UserError: The source is smaller than a batch, or the batch size or the seed is out of range.

    Example:
      >>> from jaxtrain.data import Arrays
      >>> source = Arrays(np.zeros((5, 2, 2, 1), np.float32), np.arange(5, dtype=np.int32))
      >>> loader = Loader(source, batch_size=2, seed=0, shuffle=False)
      >>> [next(loader)["label"].tolist() for _ in range(3)]
      [[0, 1], [2, 3], [0, 1]]
      >>> position = loader.state()
      >>> expected = next(loader)["label"]
      >>> loader.restore(position)
      >>> bool((next(loader)["label"] == expected).all())
      True
      >>> next(Loader(source, batch_size=4, seed=0, shuffle=False, rows=[2, 3]))["label"].tolist()
      [2, 3]
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_threads: int = 2,
        prefetch: int = 4,
        rows: Rows | None = None,
    ) -> None:
        _check_batch_size(batch_size)
        if len(source) < batch_size:
            raise UserError(
                f"batch_size must be at most the number of examples, {len(source)}, got {batch_size}: use a smaller one"
            )
        if seed < 0:
            raise UserError(f"the data seed must be at least 0, got {seed}")
        self._order = {"examples": len(source), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        # Indices are permuted instead of examples, so that only the rows needed are read.
        # shuffle(seed) would add the epoch to the seed, so that seeds 0 and 1 share all epochs but one;
        # .seed(seed) hashes it first.
        numbers = grain.MapDataset.range(len(source)).seed(seed)
        ordered = numbers.shuffle() if shuffle else numbers
        # Batching precedes repeating, so that the remainder of an epoch stays out of the next one.
        batches = ordered.batch(batch_size, drop_remainder=True, batch_fn=np.array).repeat()
        self.rows = np.arange(batch_size) if rows is None else np.asarray(rows, np.intp)
        self._by_position = batches.map(lambda batch: _stack([source[int(i)] for i in batch[self.rows]]))
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        self._batches = iter(self._by_position.to_iter_dataset(options))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        try:
            batch: Batch = next(self._batches)
        except BaseException:
            # grain has removed the batch from its queue without counting it: restart the queue there.
            self._batches.set_state(self._batches.get_state())
            raise
        return batch

    def peek(self) -> Batch:
        """Return the next batch without handing it out; only its examples are read, and nothing is prefetched."""
        batch: Batch = self._by_position[self._batches.get_state()["next_index"]]
        return batch

    def state(self) -> dict[str, int]:
        """Return the position after the last batch returned, as numbers that JSON can store."""
        return {"next_batch": self._batches.get_state()["next_index"], **self._order}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore a position from `state()`, so that the same batches follow.

        Raises:
          UserError: The number of examples, the batch size, the seed or the shuffling differs.
        """
        for name, here in self._order.items():
            if state[name] != here:
                raise UserError(
                    f"the data position was saved with {name} {state[name]}, not {here}:"
                    f" resume with {name} {state[name]} or start a new run"
                )
        self._batches.set_state({"next_index": int(state["next_batch"])})


def epoch_batches(
    source: Source, batch_size: int, limit: int | None = None, rows: Rows | None = None
) -> Iterator[Batch]:
    """Iterate once over a source in its own order.

    Args:
      source: Source of examples.
      batch_size: Number of rows of every batch, the last one included, so that a jitted step compiles once.
      limit: Largest number of batches; None for all.
      rows: Row numbers of a batch to read and return; None for all.

    Returns:
      An iterator of batches with a float32 "weight" [batch_size]: 1 for an example, 0 for padding in the last batch.

    Raises:
      UserError: `batch_size` is less than 1.

    Example:
      >>> from jaxtrain.data import Arrays
      >>> source = Arrays(np.zeros((3, 2, 2, 1), np.float32), np.arange(3, dtype=np.int32))
      >>> [batch["weight"].tolist() for batch in epoch_batches(source, batch_size=2)]
      [[1.0, 1.0], [1.0, 0.0]]
    """
    _check_batch_size(batch_size)
    row_numbers = np.arange(batch_size) if rows is None else np.asarray(rows)
    for start in range(0, len(source), batch_size)[:limit]:
        numbers = start + row_numbers
        # Padding repeats a real example, because a model may return NaN for zeros, and NaN times weight 0 is NaN.
        filled = np.minimum(numbers, len(source) - 1).tolist()
        examples = {i: source[i] for i in dict.fromkeys(filled)}
        yield {**_stack([examples[i] for i in filled]), "weight": (numbers < len(source)).astype(np.float32)}


def _stack(examples: Sequence[Example]) -> Batch:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
