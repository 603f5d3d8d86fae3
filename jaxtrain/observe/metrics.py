"""metrics.jsonl and TensorBoard: one line, and its numbers as scalars, a logged step."""

import json
import math
import os
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxtrain.errors import RunFailed, UserError


class MetricsLog:
    """Appends to both; a line is with the system before `write` returns. JSON has no NaN: what is not finite is null.

    What either holds of `from_step` and later is forgotten, and half a line left by a kill: a resumed run writes them
    again. Raises `UserError` where they cannot be opened.
    """

    def __init__(self, path: Path, tensorboard: Path, from_step: int) -> None:
        try:
            _drop(path, from_step)
            self._events = _Events(tensorboard, from_step)
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
        try:
            _write_all(self._file, json.dumps(finite).encode() + b"\n")
            self._events.write(line)
        except OSError as error:
            raise RunFailed(
                f"step {line['step']} could not be logged in {self._file.name} ({error.strerror}): "
                "what is saved is whole; mend that, then --resume auto"
            ) from error


class _Events:
    """A TensorBoard event file. tensorboardX's own writer has a thread: a kill loses events, an error hangs it."""

    def __init__(self, folder: Path, from_step: int) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # takes a second to import

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names; a second may see two lives of a run.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (folder / name).open("xb", buffering=0)
        self._append(file_version="brain.Event:2")
        # https://github.com/tensorflow/tensorboard, event_accumulator.py: START hides this step and later of before.
        self._append(step=from_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, line: dict[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name.replace("eval_", "eval/"), simple_value=value)
            for name, value in line.items()
            if name != "step"
        ]
        self._append(step=line["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
        _write_all(self._file, size + checks[0] + data + checks[1])


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


def _write_all(file: Any, data: bytes) -> None:
    """Write `data`: on a full disk a part is taken before the rest is refused."""
    while data:
        data = data[os.write(file.fileno(), data) :]
