"""From a source to batches: endless and resumable for training, one ordered pass for evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.source import Example, Source
from jaxtrain.errors import UserError

Batch = dict[str, NDArray[Any]]  # name -> [batch_size, ...]


class Loader:
    """An endless iterator of batches, read ahead in the background.

    Every epoch is a fresh permutation of the source (its own order, if not `shuffle`), cut into batches of
    exactly `batch_size`; what remains at its end is dropped. `seed` alone decides the order, threads do not.

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
    ) -> None:
        _check_batch_size(batch_size)
        if len(source) < batch_size:
            raise UserError(
                f"batch_size is {batch_size} but there are only {len(source)} examples: choose a smaller one"
            )
        if seed < 0:
            raise UserError(f"the data seed is {seed}: choose 0 or more")
        self._order = {"examples": len(source), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        # shuffle(seed) would add the epoch to the seed: runs seeded 0 and 1 would share all epochs but one.
        # .seed(seed) hashes it first.
        examples = grain.MapDataset.source(source).seed(seed)
        ordered = examples.shuffle() if shuffle else examples
        # Batching before repeating keeps an epoch's remainder out of the next epoch.
        batches = ordered.batch(batch_size, drop_remainder=True, batch_fn=_stack).repeat()
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        self._batches = iter(batches.to_iter_dataset(options))

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


def epoch_batches(source: Source, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """One pass over `source` in its own order, in at most `limit` batches.

    Every batch has `batch_size` rows, so that a jitted step compiles once, and a float32 "weight"
    [batch_size]: 1 for an example, 0 for the rows that fill up the last batch.

    >>> from jaxtrain.data import Arrays
    >>> source = Arrays(np.zeros((3, 2, 2, 1), np.float32), np.arange(3, dtype=np.int32))
    >>> [batch["weight"].tolist() for batch in epoch_batches(source, batch_size=2)]
    [[1.0, 1.0], [1.0, 0.0]]

    Raises UserError if `batch_size` is below 1.
    """
    _check_batch_size(batch_size)
    for start in range(0, len(source), batch_size)[:limit]:
        examples = [source[i] for i in range(start, min(start + batch_size, len(source)))]
        weight = np.zeros(batch_size, np.float32)
        weight[: len(examples)] = 1
        # A real example fills up: on zeros a model may give NaN, and NaN times weight 0 is NaN.
        examples += examples[-1:] * (batch_size - len(examples))
        yield {**_stack(examples), "weight": weight}


def _stack(examples: Sequence[Example]) -> Batch:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: choose 1 or more")
