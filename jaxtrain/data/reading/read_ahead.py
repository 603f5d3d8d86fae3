"""Batches of a reader that only goes forward: read ahead by a thread, with the position of the last one handed out."""

import threading
import weakref
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.reading.data_position import check_position
from jaxtrain.data.sources import Batch, Rows


class Reader(Protocol):
    """Reads batches one after the other."""

    order: dict[str, Any]
    """What a saved position must have in common with the reader."""

    def read(self) -> Batch:
        """Read the next batch."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch read, as JSON: {"next_batch": its number, "place": where it is}."""
        ...

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`, which may be later than the place."""
        ...

    def close(self) -> None:
        """Release what reads; the reader is restored before the next batch."""
        ...


_Read = tuple[Batch, dict[str, Any]]  # a batch, and the position after it


class ReadAhead:
    """Endless iterator of a reader's batches, with the methods of a `Loader`.

    Args:
      reader: The reader.
      prefetch: Number of batches that a thread reads ahead; 0 reads in the caller's thread.
      batch_size: Number of rows of a batch.
      rows: Row numbers of a batch that the reader returns; None for all.
    """

    def __init__(self, reader: Reader, prefetch: int, batch_size: int, rows: Rows | None = None) -> None:
        self.rows: NDArray[np.intp] = np.arange(batch_size) if rows is None else np.asarray(rows, np.intp)
        self._reader, self.prefetch = reader, prefetch
        self._position = reader.position()
        self._peeked: _Read | None = None
        self._thread: _Thread | None = None
        self._is_elsewhere = False  # whether the reader must return to the position before it reads

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Batch:
        batch, position = self._peeked or self._fetch(1 + self.prefetch)
        self._peeked, self._position = None, position
        return batch

    def peek(self) -> Batch:
        """Return the next batch without handing it out; nothing after it is read."""
        if self._peeked is None:
            self._peeked = self._fetch(1)
        return dict(self._peeked[0])

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as JSON."""
        return {**self._reader.order, **self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a position from `state()`, so that the same batches follow.

        The data is read up to there with the next batch, which fails if it cannot return to the position.

        Raises:
          UserError: The position belongs to other data.
        """
        check_position(state, self._reader.order)
        # At the same batch nothing is read again: an iterator cannot return to what was peeked at.
        if state["next_batch"] != self._position["next_batch"]:
            self.close()
            self._position = {"next_batch": int(state["next_batch"]), "place": state["place"]}

    def close(self) -> None:
        """Stop the thread and release the data; the next batch continues at the position."""
        if self._thread is not None:
            self._thread.stop()
        self._reader.close()
        self._peeked, self._thread, self._is_elsewhere = None, None, True

    def _fetch(self, requested: int) -> _Read:
        """Return the next batch, while `requested` batches including it are being read."""
        position = self._position if self._is_elsewhere else None
        self._is_elsewhere = False
        if self.prefetch:
            if self._thread is None:
                self._thread = _Thread(self._reader, position)
            read = self._thread.next(requested)
        else:
            read = _read(self._reader, position)
        if isinstance(read, BaseException):
            self.close()  # examples of the batch may be lost: read it again
            raise read
        return read


class _Thread:
    """Reads as many batches as were requested. It ends at the first failure, and once nothing refers to it."""

    def __init__(self, reader: Reader, position: Mapping[str, Any] | None) -> None:
        self._requests: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[_Read | BaseException] = SimpleQueue()
        self._ended = threading.Event()
        self._pending = 0
        serve = (reader, position, self._requests, self._results, self._ended)
        # A daemon, because a stream that waits for a network must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=_serve, args=serve, name="read ahead", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._requests, self._ended)

    def next(self, requested: int) -> _Read | BaseException:
        for _ in range(requested - self._pending):
            self._requests.put(None)
            self._pending += 1
        read = self._results.get()
        self._pending -= 1
        return read

    def stop(self) -> None:
        _end(self._requests, self._ended)
        self._thread.join()


def _serve(
    reader: Reader,
    position: Mapping[str, Any] | None,
    requests: "SimpleQueue[None]",
    results: "SimpleQueue[_Read | BaseException]",
    ended: threading.Event,
) -> None:
    while True:
        requests.get()
        if ended.is_set():
            break
        read = _read(reader, position)
        position = None
        results.put(read)
        if isinstance(read, BaseException):
            break


def _end(requests: "SimpleQueue[None]", ended: threading.Event) -> None:
    ended.set()
    requests.put(None)


def _read(reader: Reader, position: Mapping[str, Any] | None) -> _Read | BaseException:
    """Return the next batch, from `position` if it is given, or the exception."""
    try:
        if position is not None:
            reader.restore(position)
        return reader.read(), reader.position()
    except BaseException as error:
        return error
