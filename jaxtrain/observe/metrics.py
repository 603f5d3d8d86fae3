"""metrics.jsonl, media and TensorBoard: one line, its files, and its numbers as scalars, per logged step."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe.histograms import Histogram
from jaxtrain.observe.log_line import LogLine
from jaxtrain.observe.media import write_media
from jaxtrain.observe.tensorboard import Events, write_all
from jaxtrain.run import encode_media


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
            _supersede(path, from_step)
            self._events = Events(tensorboard, from_step)
            # Unbuffered, so that a line is one system call, and a failed one is not repeated at close.
            self._file = path.open("ab", buffering=0)
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

    @contextmanager
    def _write_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"step {step} could not be logged in {self._file.name} ({error.strerror}): "
                "everything saved before is intact; fix that, then continue with --resume auto"
            ) from error


class NoMetricsLog:
    """The log of a process whose lines another process writes."""

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
    """Read the complete lines of a metrics.jsonl; a missing file has none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [LogLine.from_json(json.loads(line)) for line in lines if line.endswith(b"\n")]


def _supersede(path: Path, from_step: int | None) -> None:
    """Move the lines from `from_step` on, and incomplete ones, to the file beside `path`.

    The copy is appended before the lines are dropped: an interruption in between may duplicate them, never lose them.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    first = math.inf if from_step is None else from_step
    retained = [line for line in lines if _step_of(line) < first]
    superseded = [line for line in lines if not _step_of(line) < first]
    if superseded:
        with path.with_name(f"{path.stem}.superseded{path.suffix}").open("ab") as file:
            file.write(_joined(superseded))
    partial = path.with_suffix(".partial")
    partial.write_bytes(_joined(retained))
    partial.replace(path)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _step_of(line: bytes) -> float:
    """The step of a line; inf of one that is incomplete or not ours."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
