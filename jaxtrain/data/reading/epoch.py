"""One pass over data in its own order, as an evaluation needs it."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.collate import Collator
from jaxtrain.data.reading.data_kinds import Kind, kind_of
from jaxtrain.data.reading.stream import examples_of, set_epoch
from jaxtrain.data.reading.torch_loader import loader_examples
from jaxtrain.data.sources import Batch, Collate, Rows
from jaxtrain.errors import UserError


def epoch_batches(
    data: Any,
    batch_size: int,
    limit: int | None = None,
    rows: Rows | None = None,
    *,
    collate: Collate | None = None,
    batch_keys: Sequence[str] | None = None,
) -> Iterator[Batch]:
    """Iterate once over data in its own order.

    Args:
      data: Any data that `training_batches` takes, but for an iterator, which has no second pass. A DataLoader may have
        another batch size.
      batch_size: Number of rows of every batch, the last one included, so that a jitted step compiles once.
      limit: Largest number of batches; None for all.
      rows: Row numbers of a batch to read and return; None for all.
      collate: Function of the list of examples of a batch that returns the batch; None stacks their arrays. A
        DataLoader applies its own.
      batch_keys: Names for the values of examples that are tuples.

    Returns:
      An iterator of batches with a float32 "weight" [batch_size]: 1 for an example, 0 for padding in the last batch.
      Examples that have a "weight" keep it; that of padding becomes 0.

    Raises:
      UserError: `batch_size` is less than 1, the data is of no such kind, a stream has no examples, or the examples do
        not form a batch.

    Example:
      >>> from jaxtrain.data import Arrays
      >>> source = Arrays(np.zeros((3, 2, 2, 1), np.float32), np.arange(3, dtype=np.int32))
      >>> [batch["weight"].tolist() for batch in epoch_batches(source, batch_size=2)]
      [[1.0, 1.0], [1.0, 0.0]]
    """
    check_batch_size(batch_size)
    kind, data = kind_of(data)
    row_numbers = np.arange(batch_size) if rows is None else np.asarray(rows)
    if kind is Kind.SOURCE:
        yield from _source_batches(data, batch_size, limit, row_numbers, Collator(collate, batch_keys))
        return
    if isinstance(data, Iterator):
        raise UserError("an iterator has one pass, which one evaluation would use up: give a function that returns one")
    if kind is Kind.LOADER:
        examples, collator = loader_examples(data, Collator(batch_keys=batch_keys)), Collator()
    else:
        set_epoch(data, 0)  # every evaluation has the same order
        examples, collator = examples_of(data), Collator(collate, batch_keys)
    yield from _stream_batches(examples, batch_size, limit, row_numbers, collator)


def check_batch_size(batch_size: int) -> None:
    """Check that a batch has rows.

    Args:
      batch_size: Number of rows.

    Raises:
      UserError: It is less than 1.

    Example:
      >>> check_batch_size(0)
      Traceback (most recent call last):
      jaxtrain.errors.UserError: batch_size must be at least 1, got 0
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")


def _with_weight(batch: Batch, is_example: NDArray[np.bool_]) -> Batch:
    """Add the weight of each row, or multiply the weights that the examples have, so that padding weighs 0."""
    weight = is_example.astype(np.float32)
    if "weight" in batch:
        own = batch["weight"]
        weight = own * weight.reshape(-1, *[1] * (own.ndim - 1)).astype(own.dtype)
    return {**batch, "weight": weight}


def _source_batches(source: Any, batch_size: int, limit: int | None, rows: Any, collator: Collator) -> Iterator[Batch]:
    for start in range(0, len(source), batch_size)[:limit]:
        numbers = start + rows
        # Padding repeats a real example, because a model may return NaN for zeros, and NaN times weight 0 is NaN.
        batch = collator.read(source, np.minimum(numbers, len(source) - 1).tolist())
        yield _with_weight(batch, numbers < len(source))


def _stream_batches(
    examples: Iterator[Any], batch_size: int, limit: int | None, rows: Any, collator: Collator
) -> Iterator[Batch]:
    start = 0
    while limit is None or start < limit * batch_size:
        read = list(islice(examples, batch_size))
        if not read:
            break
        filled = np.minimum(rows, len(read) - 1)
        batch = collator([read[row] for row in filled], (start + filled).tolist())
        yield _with_weight(batch, rows < len(read))
        start += batch_size
    if not start and limit != 0:
        raise UserError("the stream to evaluate has no examples: give one that has some, or a new iterator every time")
