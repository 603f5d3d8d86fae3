"""metrics.jsonl and TensorBoard: one line, and its numbers as scalars, a logged step."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.observe.histograms import Histogram
from jaxtrain.observe.tensorboard import Events, write_all


class MetricsLog:
    """Appends to both; a line is with the system before `write` returns. JSON has no NaN: what is not finite is null.

    What either holds of `from_step` and later is forgotten, and half a line left by a kill: a resumed run writes them
    again. Raises `UserError` where they cannot be opened.
    """

    def __init__(self, path: Path, tensorboard: Path, from_step: int) -> None:
        try:
            _drop(path, from_step)
            self._events = Events(tensorboard, from_step)
            # Without a buffer a line is one call of the system, and a failed one is not tried again on closing.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path.parent} cannot be written ({error.strerror}): mend that first") from error

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._events.close()

    def write(self, line: dict[str, Any]) -> None:
        """Log one step's numbers; `line["step"]` says which. Raises `RunFailed` where the system refuses."""
        finite = {k: v if math.isfinite(v) else None for k, v in line.items()}
        with self._refusals(line["step"]):
            write_all(self._file, json.dumps(finite).encode() + b"\n")
            self._events.scalars(line)

    def histograms(self, step: int, of: Mapping[str, Histogram]) -> None:
        """Show TensorBoard how the numbers of arrays are distributed. Raises `RunFailed` where the system refuses."""
        with self._refusals(step):
            self._events.histograms(step, of)

    @contextmanager
    def _refusals(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"step {step} could not be logged in {self._file.name} ({error.strerror}): "
                "what is saved is whole; mend that, then --resume auto"
            ) from error


class NoMetricsLog:
    """Of a process whose lines another one writes."""

    def __enter__(self) -> "NoMetricsLog":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def write(self, line: dict[str, Any]) -> None:
        """Leave it."""

    def histograms(self, step: int, of: Mapping[str, Histogram]) -> None:
        """Leave them."""


def metrics_log(path: Path, tensorboard: Path, from_step: int) -> MetricsLog | NoMetricsLog:
    """The run's `MetricsLog`, of its first process; the others have none."""
    return MetricsLog(path, tensorboard, from_step) if processes.is_first() else NoMetricsLog()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, but for one not yet written to its end; none where there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _drop(path: Path, from_step: int) -> None:
    """Leave the lines before `from_step`, all of them or all that there were, whenever this is cut short."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines() if _step_of(line) < from_step]
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(line + b"\n" for line in kept))
    partial.replace(path)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut short by a kill
