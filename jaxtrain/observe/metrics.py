"""metrics.jsonl, media and TensorBoard: one line, its files, and its numbers as scalars, per logged step."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.folder_files import UnsafeFile, append_file, new_file, open_file, parse_json
from jaxtrain.observe.dashboards.tensorboard import Events, write_all
from jaxtrain.observe.histograms import Histogram
from jaxtrain.observe.line_types import check_line
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.media_files import write_media
from jaxtrain.run import encode_media

_MOST_BYTES = 2**30
"""Largest metrics.jsonl that is read."""
_MOST_OF_LINE = 2**24


class MetricsLog:
    """Append lines to metrics.jsonl and scalars to TensorBoard event files.

    A line is with the operating system before `write` returns. JSON has no NaN: a number that is not finite is null.
    The files of media are in the folder `media` beside metrics.jsonl; a line names its own.

    A resumed run passes `from_step`, the first step that it repeats. Lines of that step and of later ones, and a line
    cut short by a kill, then leave metrics.jsonl; they are appended to metrics.superseded.jsonl beside it, never
    deleted. TensorBoard no longer shows those steps.

    Args:
      path: The file metrics.jsonl; created if there is none.
      tensorboard: Folder of the event files; created if there is none.
      from_step: First step that will be written again; None appends after the last line.

    Raises:
      UserError: A file cannot be opened or written.
    """

    def __init__(self, path: Path, tensorboard: Path, from_step: int | None = None) -> None:
        self._media = path.with_name("media")
        try:
            self.damaged = _supersede(path, from_step)
            """Numbers of lines of `path` that were moved because they are not lines of a run."""
            self._events = Events(tensorboard, from_step)
            # Unbuffered, so that a line is one system call, and a failed one is not repeated at close.
            self._path, self._file = path, append_file(path)
        except OSError as error:
            raise UserError(f"{path.parent} cannot be written ({error.strerror}): make it writable first") from error

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._events.close()

    def write(self, line: LogLine | Mapping[str, Any], media: Mapping[str, Any] | None = None) -> None:
        """Log the metrics of one step, and media.

        Args:
          line: A `LogLine`, or a mapping with a "step" and any numbers by name.
          media: `jaxtrain.Image`, `Audio`, `Text` and `Table`, or lists of one of them, by tag.

        Raises:
          UserError: A value of `media` is not valid.
          RunFailed: The operating system refuses the write.
        """
        line, files = LogLine.of(line), encode_media(media or {})
        with self._write_errors(line.step):
            line = replace(line, media=write_media(self._media, line.step, files))
            self._restore_deleted()
            write_all(self._file, json.dumps(line.to_json()).encode() + b"\n")
            self._events.scalars(line)
            self._events.media(line.step, files)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write the distributions of arrays, by name, to TensorBoard.

        Raises:
          RunFailed: The operating system refuses the write.
        """
        with self._write_errors(step):
            self._events.histograms(step, histograms)

    def _restore_deleted(self) -> None:
        """Write the file again if it was deleted; append to the other one if it was replaced, as by an editor."""
        number = self._file.fileno()
        if os.fstat(number).st_nlink:
            return
        if not self._path.exists():
            with new_file(self._path) as file:
                os.lseek(number, 0, os.SEEK_SET)
                while part := os.read(number, 2**20):
                    file.write(part)
        self._file.close()
        self._file = append_file(self._path)

    @contextmanager
    def _write_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"step {step} could not be logged in {self._path} ({error.strerror}): "
                "everything saved before is intact; fix that, then continue with --resume auto"
            ) from error


class NoMetricsLog:
    """The log of a process whose lines another process writes."""

    damaged: Sequence[int] = ()

    def __enter__(self) -> "NoMetricsLog":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def write(self, line: LogLine | Mapping[str, Any], media: Mapping[str, Any] | None = None) -> None:
        """Ignore the line."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Ignore the histograms."""


def metrics_log(path: Path, tensorboard: Path, from_step: int | None) -> MetricsLog | NoMetricsLog:
    """Return the `MetricsLog` of a run in its first process, a `NoMetricsLog` in the others."""
    return MetricsLog(path, tensorboard, from_step) if processes.is_first() else NoMetricsLog()


def read_metrics(path: Path) -> list[LogLine]:
    """Read the complete lines of a metrics.jsonl; a missing file has none.

    Raises:
      UserError: The file cannot be read, or a line is not one of a run.
    """
    lines: list[LogLine] = []
    number = 0
    try:
        if not path.is_symlink() and not path.exists():
            return []
        with open_file(path) as file:
            for line in _lines(path, file, _MOST_BYTES):
                number += 1
                if line.endswith(b"\n"):
                    values = parse_json(line)
                    check_line(values)
                    lines.append(LogLine.from_json(values))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it, or leave it out") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read (line {number}: {error}): remove that line") from error
    return lines


def _lines(path: Path, file: IO[bytes], most: float = math.inf) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end. Raises `UnsafeFile` for a line or a file that is too large."""
    size = 0
    while line := file.readline(_MOST_OF_LINE):
        size += len(line)
        if len(line) == _MOST_OF_LINE:
            raise UnsafeFile(path, f"a line has {_MOST_OF_LINE:,} bytes or more")
        if size > most:
            raise UnsafeFile(path, f"it has more than {most:,} bytes")
        yield line


def _supersede(path: Path, from_step: int | None) -> list[int]:
    """Move the lines from `from_step` on, and incomplete ones, to the file beside `path`.

    Returns the numbers of the lines that are complete, but not ones of a run.

    The copy is appended before the lines are dropped: an interruption in between may duplicate them, never lose them.
    """
    if not path.is_symlink() and not path.exists():
        return []
    first = math.inf if from_step is None else from_step
    retained, superseded, damaged = list[bytes](), list[bytes](), list[int]()
    with open_file(path) as file:
        for number, line in enumerate(_lines(path, file), 1):
            step = _step_of(line)
            (retained if step < first else superseded).append(line.removesuffix(b"\n") + b"\n")
            if step == math.inf and line.endswith(b"\n"):  # one without an end was cut short by a kill
                damaged.append(number)
    if superseded:
        with append_file(path.with_name(f"{path.stem}.superseded{path.suffix}")) as file:
            write_all(file, b"".join(superseded))
    with new_file(path) as file:
        file.writelines(retained)
    return damaged


def _step_of(line: bytes) -> float:
    """The step of a line; inf of one that is incomplete or not ours."""
    try:
        values = parse_json(line)
        check_line(values)
    except ValueError:
        return math.inf
    return float(values["step"])
