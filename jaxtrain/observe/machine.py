"""Consoles for programs instead of people: a quiet one, and one that prints JSON."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from jaxtrain.observe.console import Console, ProgressView
from jaxtrain.observe.log_line import LogLine


class QuietConsole(Console):
    """A console that prints only messages, to standard error."""

    def message(self, text: str) -> None:
        """Print one line."""
        print(self.wording(text), file=sys.stderr, flush=True)

    def headline(self, text: str) -> None:
        """Print nothing."""

    def facts(self, rows: Mapping[str, str]) -> None:
        """Print nothing."""

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Print nothing."""
        yield

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Print nothing."""
        yield self

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        """Print nothing."""

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Print nothing."""

    def summary(
        self,
        metrics: Sequence[LogLine | Mapping[str, Any]],
        references: Mapping[str, float],
        places: Mapping[str, str],
    ) -> None:
        """Print nothing."""

    def sample(self, text: str) -> None:
        """Print nothing."""


class JsonConsole(Console):
    """A console that prints everything as JSON, one object per line; the key `event` names its kind.

    Numbers that are not finite are null.

    Args:
      out: The file to write to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__()
        self._out = out or sys.stdout

    def headline(self, text: str) -> None:
        """Print `{"event": "start", "text"}`."""
        self._event("start", text=text)

    def message(self, text: str) -> None:
        """Print `{"event": "message", "text"}`."""
        self._event("message", text=text)

    def facts(self, rows: Mapping[str, str]) -> None:
        """Print `{"event": "facts", name: value …}`."""
        self._event("facts", **rows)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Print `{"event": "phase", "text", "seconds"}` when the phase ends."""
        begin = time.perf_counter()
        yield
        self._event("phase", text=text, seconds=round(time.perf_counter() - begin, 3))

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Print `{"event": "step", "of", …}` with the line of metrics.jsonl, for each logged step.

        The first row of each table of an evaluation is `{"event": "table", "step", "tag", "row"}`.
        """
        yield _JsonProgress(self, total)

    def summary(
        self,
        metrics: Sequence[LogLine | Mapping[str, Any]],
        references: Mapping[str, float],
        places: Mapping[str, str],
    ) -> None:
        """Print `{"event": "end", "step", "best", "references", …}`; `best` is the line of the lowest eval_loss."""
        lines = [LogLine.of(line) for line in metrics]
        evaluations = [line for line in lines if line.has_finite_eval_loss]
        best = min(evaluations, key=lambda line: line.evaluation["loss"], default=None)
        step = lines[-1].step if lines else 0
        self._event("end", step=step, best=best and best.to_json(), references=dict(references), **places)

    def sample(self, text: str) -> None:
        """Print `{"event": "sample", "text"}`."""
        self._event("sample", text=text)

    def _event(self, event: str, **fields: Any) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        print(json.dumps({"event": event} | finite), file=self._out, flush=True)


class _JsonProgress:
    def __init__(self, console: JsonConsole, total: int) -> None:
        self._console, self._total = console, total

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        if line:
            self._console._event("step", of=self._total, **LogLine.of(line).to_json())

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        for tag, row in rows.items():
            self._console._event("table", step=step, tag=tag, row=dict(row))
