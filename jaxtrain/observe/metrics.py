"""metrics.jsonl and TensorBoard: one line, and its numbers as scalars, a logged step."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsLog:
    """Appends to both; a line is on disk before `write` returns. JSON has no NaN: what is not finite is null."""

    def __init__(self, path: Path, tensorboard: Path) -> None:
        self._path = path
        self._tensorboard = tensorboard
        self._file = path.open("a")
        self._writer = _event_writer(tensorboard)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._writer.close()

    def write(self, line: dict[str, Any]) -> None:
        """Log one step's numbers; `line["step"]` says which."""
        finite = {k: v if math.isfinite(v) else None for k, v in line.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name.replace("eval_", "eval/"), value, line["step"])

    def drop_after(self, step: int) -> None:
        """Forget the lines after `step`: a resumed run writes them again."""
        kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        self._file.close()
        partial.replace(self._path)
        self._file = self._path.open("a")
        self._writer.close()
        self._writer = _event_writer(self._tensorboard, purge_step=step + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _event_writer(folder: Path, **options: int) -> Any:
    from tensorboardX import SummaryWriter  # takes a second to import

    return SummaryWriter(str(folder), **options)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf  # cut short by a kill
