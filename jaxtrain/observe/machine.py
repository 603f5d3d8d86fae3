"""Consoles for what is no person: one that says only what went out of the ordinary, one that speaks JSON."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from jaxtrain.observe.console import Console, ProgressView


class QuietConsole(Console):
    """Messages go to standard error, all else nowhere."""

    def message(self, text: str) -> None:
        """One line."""
        print(text, file=sys.stderr, flush=True)

    def headline(self, text: str) -> None:
        """Nothing."""

    def facts(self, rows: Mapping[str, str]) -> None:
        """Nothing."""

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Nothing."""
        yield

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Nothing."""
        yield self

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        """Nothing."""

    def summary(
        self, metrics: list[dict[str, Any]], references: Mapping[str, float], places: Mapping[str, str]
    ) -> None:
        """Nothing."""

    def sample(self, text: str) -> None:
        """Nothing."""


class JsonConsole(Console):
    """All that a person would be told, as an object a line; `event` says of which kind. What is not finite is null."""

    def __init__(self, out: TextIO | None = None) -> None:
        super().__init__()
        self._out = out or sys.stdout

    def headline(self, text: str) -> None:
        """`{"event": "start", "text"}`."""
        self._event("start", text=text)

    def message(self, text: str) -> None:
        """`{"event": "message", "text"}`."""
        self._event("message", text=text)

    def facts(self, rows: Mapping[str, str]) -> None:
        """`{"event": "facts", name: value …}`."""
        self._event("facts", **rows)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """`{"event": "phase", "text", "seconds"}`, when it ends."""
        begin = time.perf_counter()
        yield
        self._event("phase", text=text, seconds=round(time.perf_counter() - begin, 3))

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """`{"event": "step", "of", …}`, with what metrics.jsonl holds of it, for each step that is logged."""
        yield _Steps(self, total)

    def summary(
        self, metrics: list[dict[str, Any]], references: Mapping[str, float], places: Mapping[str, str]
    ) -> None:
        """`{"event": "end", "step", "best", "references", …}`: `best` is the line of the lowest validation loss."""
        evaluated = [line for line in metrics if line.get("eval_loss") is not None]
        best = min(evaluated, key=lambda line: line["eval_loss"], default=None)
        step = metrics[-1]["step"] if metrics else 0
        self._event("end", step=step, best=best, references=dict(references), **places)

    def sample(self, text: str) -> None:
        """`{"event": "sample", "text"}`."""
        self._event("sample", text=text)

    def _event(self, event: str, **of: Any) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in of.items()}
        print(json.dumps({"event": event} | finite), file=self._out, flush=True)


class _Steps:
    def __init__(self, console: JsonConsole, total: int) -> None:
        self._console, self._total = console, total

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        if line:
            self._console._event("step", of=self._total, **line)
