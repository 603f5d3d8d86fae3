"""Batches of a source: endless, shuffled and resumable."""

import functools
from collections.abc import Callable, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import cloudpickle
import grain
import jax
import numpy as np
from absl import flags

from jaxtrain.data.collate import Collator
from jaxtrain.data.reading.epoch import check_batch_size
from jaxtrain.data.reading.epoch import epoch_batches as epoch_batches
from jaxtrain.data.reading.numbered_batches import NumberedBatches
from jaxtrain.data.reading.read_ahead import TrainingBatches
from jaxtrain.data.rows.packing import PackedRows
from jaxtrain.data.sources import Batch as Batch
from jaxtrain.data.sources import Collate, Rows, Source
from jaxtrain.errors import UserError

_ENDLESS = 2**62


class Loader(TrainingBatches):
    """Endless iterator of batches, prefetched in the background.

    Every epoch is a new permutation of the source, divided into batches of exactly `batch_size`; the remainder is
    dropped. The order depends on `seed` only, not on threads.

    Args:
      source: Source of examples, which are dicts, or tuples named by `batch_keys`. If it has `__getitems__`, a batch is
        read with one call of it.
      batch_size: Number of rows of a batch.
      seed: Seed of the permutations, at least 0.
      shuffle: Whether to permute the examples; otherwise they keep the order of the source.
      num_threads: Number of threads that read.
      prefetch: Number of batches to read ahead.
      rows: Row numbers of a batch to read, as one of several processes needs them; None for all. The position of the
        loader is that of the whole batches.
      workers: Number of processes that read and transform the examples, each a copy of the source; 0 reads in threads
        of this process. A script that uses them needs the usual `if __name__ == "__main__":`.
      collate: Function of the list of examples of a batch that returns the batch; None stacks their arrays.
      batch_keys: Names for the values of examples that are tuples.

    Raises:
      UserError: The source is smaller than a batch, or the batch size, the seed or the number of workers is out of
        range. On access, if the examples do not form a batch, or the source cannot be copied to a worker.

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
        *,
        workers: int = 0,
        collate: Collate | None = None,
        batch_keys: Sequence[str] | None = None,
    ) -> None:
        _check_size(source, batch_size)
        if seed < 0:
            raise UserError(f"the data seed must be at least 0, got {seed}")
        if workers < 0:
            raise UserError(f"the number of workers must be at least 0, got {workers}")
        if workers:
            _check_shared_memory(workers)
        # Indices are permuted instead of examples, so that only the rows needed are read.
        # shuffle(seed) would add the epoch to the seed, so that seeds 0 and 1 share all epochs but one;
        # .seed(seed) hashes it first.
        numbers = grain.MapDataset.range(len(source)).seed(seed)
        ordered = numbers.shuffle() if shuffle else numbers
        row_numbers = np.arange(batch_size) if rows is None else np.asarray(rows, np.intp)
        self._read = functools.partial(_read, source, ordered, batch_size, row_numbers, Collator(collate, batch_keys))
        order = {"examples": len(source), "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
        reader = NumberedBatches(order, self._read, num_threads)
        if workers:
            reader = _WorkerBatches(order, self._read, batch_size, workers, prefetch)
        super().__init__(reader, prefetch, batch_size, rows)

    def peek(self) -> Batch:
        """Return the next batch without handing it out; only its examples are read, and nothing is prefetched."""
        return self._read(self._position["next_batch"])


class _WorkerBatches(NumberedBatches):
    """Reads batches in worker processes of grain, ahead of the position."""

    def __init__(
        self, order: dict[str, Any], read: Callable[[int], Batch], batch_size: int, workers: int, prefetch: int
    ) -> None:
        super().__init__(order, read, threads=0)
        # Not a batched dataset of the numbers, which would compute those of all rows of a batch in every process.
        self._by_number = grain.MapDataset.range(_ENDLESS // batch_size).map(read)
        self._processes = grain.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=max(1, prefetch // workers)
        )
        self._batches: Any = None  # started by the first batch, and again after a failed one

    def advance(self) -> Callable[[], Batch]:
        """Read the next batch."""
        if self._batches is None:
            self._batches = self._start()
        try:
            batch: Batch = next(self._batches)
        except Exception:
            _check_picklable(self._by_number)
            raise
        self._next_batch += 1
        # The arrays are in shared memory, which is freed with them.
        return lambda: {name: np.array(array) for name, array in batch.items()}

    def close(self) -> None:
        """End the processes."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _start(self) -> Any:
        """Return an iterator over the batches from the position on."""
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags, which only an absl program parses
        in_turn = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        configure = functools.partial(_configure_worker, jax.config.read("jax_enable_x64"))
        remaining = self._by_number[self._next_batch :].to_iter_dataset(in_turn)
        return iter(remaining.mp_prefetch(self._processes, configure))


def _read(source: Source, ordered: Any, batch_size: int, rows: Any, collator: Collator, number: int) -> Batch:
    """Read rows of a batch, of which every epoch has as many as fit."""
    epoch, batch = divmod(number, len(source) // batch_size)
    first = epoch * len(source) + batch * batch_size
    return collator.read(source, [int(ordered[first + row]) for row in rows.tolist()])


def _check_size(source: Source, batch_size: int) -> None:
    check_batch_size(batch_size)
    if not len(source):
        raise UserError("the training data have no examples: give at least batch_size of them")
    if len(source) < batch_size:
        if isinstance(source, PackedRows):
            raise UserError(
                f"the examples fill {len(source)} rows of {source.length} tokens, fewer than batch_size"
                f" {batch_size}: use a smaller one, or a smaller seq_len, or no packing"
            )
        raise UserError(
            f"batch_size must be at most the number of examples, {len(source)}, got {batch_size}: use a smaller one"
        )


def _check_picklable(batches: Any) -> None:
    try:
        cloudpickle.dumps(batches)
    except Exception as error:
        raise UserError(
            f"the data cannot be copied to worker processes ({str(error).splitlines()[0]}): set workers to 0"
        ) from None


def _configure_worker(x64: bool, index: int, count: int) -> None:
    """Make a worker process convert as its parent does, and leave the accelerators to the parent."""
    jax.config.update("jax_enable_x64", x64)
    jax.config.update("jax_platforms", "cpu")


def _check_shared_memory(workers: int) -> None:
    """Raise `UserError` if worker processes could not hand over their arrays, which they do in shared memory."""
    try:
        probe = SharedMemory(create=True, size=1)
    except OSError as error:
        raise UserError(
            f"{workers} workers need shared memory, which cannot be created ({error.strerror}): make /dev/shm "
            "writable, or set workers to 0"
        ) from error
    probe.close()
    probe.unlink()
