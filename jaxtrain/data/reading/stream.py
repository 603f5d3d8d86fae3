"""Batches of a stream: an iterable of examples without a length."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from jaxtrain.data.collate import Collator
from jaxtrain.data.reading.smaller_batches import SmallerBatches
from jaxtrain.data.sources import Batch, Rows
from jaxtrain.errors import UserError

Stream = Iterable[Any] | Callable[[], Iterable[Any]]

_REMEDY = "give a function that returns a new iterator"


def examples_of(stream: Stream) -> Iterator[Any]:
    """Return a new iterator of a stream's examples.

    Args:
      stream: Iterable, or function without arguments that returns one.

    Returns:
      The iterator; an iterator itself.

    Example:
      >>> next(examples_of(lambda: [{"x": 1}]))
      {'x': 1}
    """
    return iter(stream if isinstance(stream, Iterable) else stream())


def set_epoch(data: Any, epoch: int) -> None:
    """Give data the number of an epoch, if it has `set_epoch`, as a `DistributedSampler` has.

    Args:
      data: Any object.
      epoch: The number.

    Example:
      >>> set_epoch([], 1)
    """
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


class StreamReader:
    """Reads batches of a stream, epoch after epoch; the last one of an epoch may have fewer rows.

    It is dropped, with a line, if it cannot be divided into micro-batches, and on a mesh.

    The position is the number of examples read of the epoch, and the stream's own state if it has `state_dict` and
    `load_state_dict`, or its iterator has `get_state` and `set_state`, as grain's do. Without own state, the examples
    before the position are read again. A stream with `set_epoch` is given the number of each epoch.

    Args:
      stream: Iterable, or function without arguments that returns one. Each of its iterators gives the same examples,
        but for what `set_epoch` changes.
      batch_size: Number of rows of a batch.
      accumulate: Number of micro-batches that a batch is divided into.
      rows: Row numbers of a batch to return; None for all.
      collator: Makes batches of examples.
      message: Prints one line.
    """

    threads = 1

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        accumulate: int,
        rows: Rows | None,
        collator: Collator,
        message: Callable[[str], None],
    ) -> None:
        self.order: dict[str, Any] = {"data": "stream", "batch_size": batch_size}
        self._stream, self._collator, self._message = stream, collator, message
        self._batch_size = batch_size
        self._smaller = SmallerBatches(batch_size, accumulate, rows is not None, message)
        self._rows = None if rows is None else [int(row) for row in rows]
        self._next_batch = self._epoch = 0
        self._examples = 0  # read of the epoch
        self._consumed = 0  # of a stream that is an iterator
        self._iterator: Iterator[Any] | None = None

    def advance(self) -> Callable[[], Batch]:
        """Read the examples of the next batch.

        Raises:
          UserError: The stream cannot start again or has too few examples; from the result if they form no batch.
        """
        examples = self._next_examples()
        first = self._examples - len(examples)
        rows = range(len(examples)) if self._rows is None else self._rows
        return partial(self._collator, [examples[row] for row in rows], [first + row for row in rows])

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch read, as JSON.

        Raises:
          UserError: The stream's own state is not JSON.
        """
        place = {"at": self._next_batch, "epoch": self._epoch, "examples": self._examples, "state": self._own_state()}
        return {"next_batch": self._next_batch, "place": place}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`.

        Raises:
          UserError: The stream ends before the position, or is an iterator that is already past it.
        """
        place = position["place"]
        self._open(place["epoch"], place["examples"], place["state"])
        self._next_batch = place["at"]
        while self._next_batch < position["next_batch"]:
            self._next_examples()

    def close(self) -> None:
        """Release the iterator."""
        self._iterator = None

    def _next_examples(self) -> list[Any]:
        iterator = self._open(self._epoch, self._examples, None) if self._iterator is None else self._iterator
        while True:
            self._consumed += self._batch_size  # before they are read, which may fail halfway
            examples = list(islice(iterator, self._batch_size))
            self._consumed -= self._batch_size - len(examples)
            is_used = len(examples) == self._batch_size
            if self._examples and 0 < len(examples) < self._batch_size:
                where = f"the last batch of epoch {self._epoch} of the stream"
                is_used = self._smaller.keeps(len(examples), where)
            if is_used:
                self._examples += len(examples)
                self._next_batch += 1
                return examples
            count = self._examples + len(examples)
            if count and isinstance(self._stream, Iterator):
                raise UserError(f"the stream ended after {count} examples, and an iterator cannot restart: {_REMEDY}")
            if not self._examples:
                again = f" or, if an earlier epoch had more, {_REMEDY}" if self._epoch else ""
                raise UserError(
                    f"epoch {self._epoch} of the stream has {len(examples)} examples, fewer than a batch of"
                    f" {self._batch_size}: use a smaller batch_size{again}"
                )
            iterator = self._open(self._epoch + 1, 0, None)

    def _open(self, epoch: int, examples: int, state: Any) -> Iterator[Any]:
        """Continue at the stream's own state, or after a number of examples of an epoch."""
        set_epoch(self._stream, epoch)
        own = _state_methods(self._stream)
        if own is not None and state is not None:
            own[1](state)  # it applies to the next iterator
            iterator, skip = examples_of(self._stream), 0
        else:
            iterator, skip = examples_of(self._stream), examples
            own = _state_methods(iterator)
            if own is not None and state is not None:
                own[1](state)
                skip = 0
            elif isinstance(self._stream, Iterator):
                skip -= self._consumed
        if skip < 0:
            raise UserError(f"an iterator cannot return to example {examples} from {self._consumed}: {_REMEDY}")
        if skip:
            self._message(f"reading {skip} examples of the stream again, up to where the run was saved")
        found = sum(1 for _ in islice(iterator, skip))
        self._consumed += found
        if found < skip:
            raise UserError(
                f"epoch {epoch} of the stream ended before example {examples}, where the run was saved: resume with"
                " the same data or start a new run"
            )
        self._iterator, self._epoch, self._examples = iterator, epoch, examples
        return iterator

    def _own_state(self) -> Any:
        # That of a stream also before the first example, without which it could not return to its beginning.
        own = _state_methods(self._stream) or _state_methods(self._iterator)
        if own is None:
            return None
        state = copy.deepcopy(own[0]())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise UserError(f"the stream's own state is not JSON ({error}): {_REMEDY} that has none") from None
        return state


def _state_methods(stream: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the functions that get and set the state of a stream or an iterator."""
    for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        get, load = (getattr(stream, name, None) for name in names)
        if callable(get) and callable(load):
            return get, load
    return None
