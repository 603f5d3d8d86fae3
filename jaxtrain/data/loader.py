"""From a source to batches: endless and resumable for training, one ordered pass for evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.source import Example, Source
from jaxtrain.errors import UserError

Batch = dict[str, NDArray[Any]]  # name -> [batch_size, ...]
Rows = Sequence[int] | NDArray[np.intp]  # positions in a batch


class Loader:
    """An endless iterator of batches, read ahead in the background.

    Every epoch is a fresh permutation of the source (its own order, if not `shuffle`), cut into batches of
    exactly `batch_size`; what remains at its end is dropped. `seed` alone decides the order, threads do not.
    With `rows`, positions in a batch, only the examples there are read: what one of several processes needs. The
    batches are then those rows of the whole ones, and the position is that of the whole ones.

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

    Raises UserError if the source is smaller than a batch, or the batch size or seed is out of range.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_threads: int = 2,
        prefetch: int = 4,  # batches
        rows: Rows | None = None,
    ) -> None:
        _check_batch_size(batch_size)
        if len(source) < batch_size:
            raise UserError(
                f"batch_size is {batch_size} but there are only {len(source)} examples: choose a smaller one"
            )
        if seed < 0:
            raise UserError(f"the data seed is {seed}: choose 0 or more")
        self._order = {"examples": len(source), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        # The order is of numbers, so that only what is wanted is read.
        # shuffle(seed) would add the epoch to the seed: runs seeded 0 and 1 would share all epochs but one.
        # .seed(seed) hashes it first.
        numbers = grain.MapDataset.range(len(source)).seed(seed)
        ordered = numbers.shuffle() if shuffle else numbers
        # Batching before repeating keeps an epoch's remainder out of the next epoch.
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
            # grain has taken the batch off its queue but not counted it; make the queue start there again.
            self._batches.set_state(self._batches.get_state())
            raise
        return batch

    def peek(self) -> Batch:
        """Return the next batch without handing it out; only its examples are read, and nothing is prefetched."""
        batch: Batch = self._by_position[self._batches.get_state()["next_index"]]
        return batch

    def state(self) -> dict[str, int]:
        """The position after the last batch handed out, as JSON-able numbers."""
        return {"next_batch": self._batches.get_state()["next_index"], **self._order}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to where `state()` was taken: the batches that follow are those that followed then.

        Raises UserError if the number of examples, the batch size, the seed or the shuffling differs.
        """
        for name, here in self._order.items():
            if state[name] != here:
                raise UserError(
                    f"the data position was saved with {name} {state[name]}, not {here}:"
                    f" resume with {name} {state[name]} or start afresh"
                )
        self._batches.set_state({"next_index": int(state["next_batch"])})


def epoch_batches(
    source: Source, batch_size: int, limit: int | None = None, rows: Rows | None = None
) -> Iterator[Batch]:
    """One pass over `source` in its own order, in at most `limit` batches.

    Every batch has `batch_size` rows, so that a jitted step compiles once, and a float32 "weight"
    [batch_size]: 1 for an example, 0 for the rows that fill up the last batch. With `rows`, positions in a batch,
    only those rows of each are read and handed out.

    >>> from jaxtrain.data import Arrays
    >>> source = Arrays(np.zeros((3, 2, 2, 1), np.float32), np.arange(3, dtype=np.int32))
    >>> [batch["weight"].tolist() for batch in epoch_batches(source, batch_size=2)]
    [[1.0, 1.0], [1.0, 0.0]]

    Raises UserError if `batch_size` is below 1.
    """
    _check_batch_size(batch_size)
    wanted = np.arange(batch_size) if rows is None else np.asarray(rows)
    for start in range(0, len(source), batch_size)[:limit]:
        numbers = start + wanted
        # A real example fills up: on zeros a model may give NaN, and NaN times weight 0 is NaN.
        filled = np.minimum(numbers, len(source) - 1).tolist()
        examples = {i: source[i] for i in dict.fromkeys(filled)}
        yield {**_stack([examples[i] for i in filled]), "weight": (numbers < len(source)).astype(np.float32)}


def _stack(examples: Sequence[Example]) -> Batch:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: choose 1 or more")
