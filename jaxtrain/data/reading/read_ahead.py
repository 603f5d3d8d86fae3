"""Batches of a reader, read ahead by threads, with the position of the last one handed out."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.sources import Batch, Rows
from jaxtrain.errors import UserError


class Reader(Protocol):
    """Reads batches one after the other."""

    order: dict[str, Any]
    """What a saved position must have in common with the reader."""
    threads: int
    """Number of threads that read at once: 1 if every batch is read after the one before it; 0 for the caller's."""

    def advance(self) -> Callable[[], Any]:
        """Advance to the next batch, and return what completes it, in any order with others."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch, as JSON: "next_batch", its number, and where it is, if need be."""
        ...

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue at `position["next_batch"]`, which may have been increased to skip batches."""
        ...

    def close(self) -> None:
        """Release what reads; the reader is restored before the next batch."""
        ...


_Read = tuple[Batch, dict[str, Any]]  # a batch, and the position after it


class _Request:
    """A batch to read, and what came of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._result: _Read | BaseException

    def fulfil(self, result: _Read | BaseException) -> None:
        """Set the result."""
        self._result = result
        self._lock.release()

    def wait(self) -> _Read | BaseException:
        """Return the result once there is one."""
        with self._lock:
            return self._result


class TrainingBatches:
    """Endless iterator of batches with a position that can be saved and restored.

    Args:
      reader: The reader.
      prefetch: Number of batches that its threads read ahead; 0 reads in the caller's thread.
      batch_size: Number of rows of a batch.
      rows: Row numbers of a batch that the reader returns; None for all.

    Attributes:
      rows: Row numbers of a batch that are read.
      prefetch: Number of batches read ahead; 0 reads in the thread that asks for a batch.
      order: What a restored position must have in common with this.

    Raises:
      UserError: `prefetch` is negative.
    """

    def __init__(self, reader: Reader, prefetch: int, batch_size: int, rows: Rows | None = None) -> None:
        if prefetch < 0:
            raise UserError(f"the number of batches to prefetch must be at least 0, got {prefetch}")
        self.rows: NDArray[np.intp] = np.arange(batch_size) if rows is None else np.asarray(rows, np.intp)
        self.order, self.prefetch, self._reader = reader.order, prefetch, reader
        self._position = reader.position()
        self._peeked: _Read | None = None
        self._service: _Service | None = None
        self._is_elsewhere = False  # whether the reader must return to the position before it reads

    def __iter__(self) -> "TrainingBatches":
        return self

    def __next__(self) -> Batch:
        batch, position = self._peeked or self._fetch(self.prefetch)
        self._peeked, self._position = None, position
        return batch

    def peek(self) -> Batch:
        """Return the next batch without handing it out; nothing after it is read."""
        if self._peeked is None:
            self._peeked = self._fetch(0)
        return dict(self._peeked[0])

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as JSON."""
        return {**self.order, **self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a position from `state()`, so that the same batches follow.

        The data is read up to there with the next batch, which fails if it cannot return to the position.

        Raises:
          UserError: The position belongs to other data, or to another order of these.
        """
        _check_position(state, self.order)
        # At the same batch nothing is read again: an iterator cannot return to what was peeked at.
        if state["next_batch"] != self._position["next_batch"]:
            self.close()
            self._position = {**{name: state[name] for name in self._position}, "next_batch": int(state["next_batch"])}

    def close(self) -> None:
        """Stop what reads ahead and release the data; the next batch continues at the position."""
        if self._service is not None:
            self._end()
            self._service.join()
        self._reader.close()
        self._peeked, self._service, self._is_elsewhere = None, None, True

    def _fetch(self, ahead: int) -> _Read:
        """Return the next batch, while `ahead` batches after it are being read."""
        if self._service is None:
            position = self._position if self._is_elsewhere else None
            self._service = _Service(self._reader, position, self._reader.threads if self.prefetch else 0)
            self._end = weakref.finalize(self, self._service.end)  # the threads end once nothing refers to this
        try:
            read = self._service.next(ahead)
        except BaseException:  # an interrupt, which leaves what threads read as it is
            if not self._service.threads:
                self.close()
            raise
        if isinstance(read, BaseException):
            self.close()  # examples of the batch may be lost: read it again
            raise read
        return read


class _Service:
    """Reads as many batches as were requested, by threads or, without any, their caller, until the first failure."""

    def __init__(self, reader: Reader, position: Mapping[str, Any] | None, threads: int) -> None:
        self._reader, self._position = reader, position
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._pending: deque[_Request] = deque()
        self._ended, self._lock = threading.Event(), threading.Lock()
        # Daemons, because a stream that waits for a network must not keep the interpreter from exiting.
        self.threads = [threading.Thread(target=self._serve, name="read ahead", daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def next(self, ahead: int) -> _Read | BaseException:
        """Return the next batch or its failure, and request those `ahead` of it."""
        while len(self._pending) < 1 + (ahead if self.threads else 0):
            self._pending.append(_Request())
            self._requests.put(self._pending[-1])
        if not self.threads:
            self._serve_one()
        read = self._pending[0].wait()  # an interrupt leaves it pending
        self._pending.popleft()
        return read

    def end(self) -> None:
        """Let the threads end."""
        self._ended.set()
        for _ in self.threads:
            self._requests.put(_Request())

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self.threads:
            thread.join()

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Read the batch of a request; return whether there may be others."""
        with self._lock:
            request = self._requests.get()
            if self._ended.is_set():
                return False
            try:
                if self._position is not None:
                    self._reader.restore(self._position)
                    self._position = None
                complete, position = self._reader.advance(), self._reader.position()
            except BaseException as error:
                self._ended.set()
                request.fulfil(error)
                return False
        try:
            request.fulfil((complete(), position))
        except BaseException as error:
            self._ended.set()
            request.fulfil(error)
        return not self._ended.is_set()


def _check_position(state: Mapping[str, Any], order: Mapping[str, Any]) -> None:
    """Check that a saved position belongs to data of the same order, whose entries it has.

    Example:
      >>> _check_position({"next_batch": 3, "seed": 1}, {"seed": 0})
      Traceback (most recent call last):
      jaxtrain.errors.UserError: the data position was saved with seed 1, not 0: resume with seed 1 or start a new run
    """
    for name, here in order.items():
        if name not in state:
            raise UserError(
                f"the data position was saved for another kind of data, without {name}: resume with the same data or"
                " start a new run"
            )
        if state[name] != here:
            raise UserError(
                f"the data position was saved with {name} {state[name]}, not {here}:"
                f" resume with {name} {state[name]} or start a new run"
            )
