"""Training batches of any data."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.data.collate import Collator
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.reading.data_kinds import Kind, kind_of
from jaxtrain.data.reading.epoch import check_batch_size
from jaxtrain.data.reading.epoch import epoch_batches as epoch_batches
from jaxtrain.data.reading.numbered_batches import MixtureBatches
from jaxtrain.data.reading.read_ahead import Reader
from jaxtrain.data.reading.read_ahead import TrainingBatches as TrainingBatches
from jaxtrain.data.reading.stream import StreamReader
from jaxtrain.data.reading.torch_loader import DataLoaderReader, last_rows
from jaxtrain.data.sources import Collate, Rows
from jaxtrain.errors import UserError


def training_batches(
    data: Any,
    batch_size: int,
    seed: int,
    *,
    workers: int = 0,
    prefetch: int = 4,
    rows: Rows | None = None,
    accumulate: int = 1,
    collate: Collate | None = None,
    batch_keys: Sequence[str] | None = None,
    message: Callable[[str], None] = lambda _: None,
) -> TrainingBatches:
    """Return the endless batches of any data, which are reproducible and can be resumed at any batch.

    | data | batches |
    | --- | --- |
    | mapping of arrays of equal length | shuffled by `seed`, as `Loader` does |
    | anything with `__len__` and `__getitem__`: a list, a dataset of PyTorch or `datasets` | the same |
    | `Mixture` of such sources | in its own order: exact proportions, each source shuffled by `seed` |
    | iterable of examples, or function that returns one | in their order, the smaller last one of an epoch included |
    | `torch.utils.data.DataLoader` | its own, with its workers and its `collate_fn`, the smaller last one included |

    Examples are dicts of arrays of NumPy, JAX or PyTorch, numbers or lists of numbers; or tuples of them, named by
    `batch_keys`. `MappedSource` applies a function to the examples of a source. 64-bit numbers become 32-bit ones
    unless `jax_enable_x64` is set.

    A stream resumes by its own state if it has `state_dict` and `load_state_dict`, or its iterator has `get_state` and
    `set_state`, as grain's do; the shuffle buffer of a `datasets.IterableDataset` is not part of it. Otherwise the
    epoch's examples before the position are read again, so that every iterator must give the same examples. A method
    `set_epoch` may change them from epoch to epoch.

    The order of a DataLoader depends on `seed` and the epoch: while it is used, the global random generators of
    PyTorch, NumPy and Python and those of the loader and its samplers have states derived from these. To resume, the
    epoch's batches before the position are read again. The random numbers of workers with `persistent_workers=True`
    continue from epoch to epoch, which a resumed run does not reproduce.

    Args:
      data: The data.
      batch_size: Number of rows of a batch.
      seed: Seed of the order, at least 0.
      workers: Number of processes that read the examples of a source, each one after the other; 0 reads in two threads
        of this process. A script that uses them needs the usual `if __name__ == "__main__":`.
      prefetch: Number of batches to read ahead; a DataLoader's workers do so themselves.
      rows: Row numbers of a batch to return, as one of several processes needs them; None for all.
      accumulate: Number of micro-batches that a batch is divided into: the smaller last batch of an epoch is dropped,
        with a line, if it cannot be, and with `rows`.
      collate: Function of the list of examples of a batch that returns the batch; None stacks their arrays.
      batch_keys: Names for the values of examples or batches that are tuples.
      message: Prints one line, such as how much is read again to resume.

    Returns:
      The batches, each a dict of NumPy arrays.

    Raises:
      UserError: The data is of no such kind, or an argument does not apply to it or is out of range. On access, if the
        examples do not form a batch.

    Example:
      >>> import numpy as np
      >>> batches = training_batches({"x": np.zeros((6, 2)), "y": np.arange(6)}, batch_size=3, seed=0)
      >>> {name: (array.shape, str(array.dtype)) for name, array in next(batches).items()}
      {'x': ((3, 2), 'float32'), 'y': ((3,), 'int32')}
      >>> position = batches.state()
      >>> expected = next(batches)["y"]
      >>> batches.restore(position)
      >>> bool((next(batches)["y"] == expected).all())
      True
      >>> squares = training_batches(lambda: ((i, i**2) for i in range(5)), 2, seed=0, batch_keys=("x", "y"))
      >>> [next(squares)["y"].tolist() for _ in range(4)]
      [[0, 1], [4, 9], [16], [0, 1]]
    """
    kind, data = kind_of(data)
    if kind is Kind.SOURCE and not isinstance(data, Mixture):
        # grain is imported for these alone, so that a mixture needs the base install only.
        from jaxtrain.data.loader import Loader

        return Loader(
            data,
            batch_size,
            seed,
            rows=rows,
            prefetch=prefetch,
            workers=workers,
            collate=collate,
            batch_keys=batch_keys,
        )
    check_batch_size(batch_size)
    collator = Collator(collate, batch_keys)
    reader: Reader
    if isinstance(data, Mixture):
        if workers:
            raise UserError(f"workers={workers} does not apply to a mixture, which a thread reads: leave it at 0")
        reader = MixtureBatches(data, batch_size, seed, rows, collator)
    elif kind is Kind.STREAM:
        if workers:
            raise UserError(f"workers={workers} needs data with a length: leave it at 0 for a stream")
        reader = StreamReader(data, batch_size, accumulate, rows, collator, message)
    else:
        if seed < 0:
            raise UserError(f"the data seed must be at least 0, got {seed}")
        if workers or collate is not None:
            option, its = ("workers", "num_workers") if workers else ("collate", "collate_fn")
            raise UserError(f"{option} does not apply to a DataLoader: use its {its}")
        reader = DataLoaderReader(data, batch_size, accumulate, seed, rows, collator, message)
        # Not in a thread, because the global random generators are exchanged while the loader is used.
        prefetch = min(prefetch, 0)
    return TrainingBatches(reader, prefetch, batch_size, rows)


def shorter_rows(data: Any, batch_size: int) -> int | None:
    """Return how many rows the smaller last batch of an epoch has, with which a stream or a DataLoader may end.

    Args:
      data: The data.
      batch_size: Number of rows of the other batches.

    Returns:
      Their number, 0 if there is no smaller batch, None if that is not known before the data are read.
    """
    kind, data = kind_of(data)
    if kind is Kind.STREAM:
        return None
    if kind is Kind.SOURCE:
        return 0
    last = last_rows(data, batch_size)
    return 0 if last == batch_size else last
