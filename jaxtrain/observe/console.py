"""The terminal output of a run: phases, facts, progress and a summary.

Live on a terminal, plain lines elsewhere.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import format_bytes
from jaxtrain.data import replace_unprintable
from jaxtrain.errors import escape_unprintable
from jaxtrain.observe.curve import curve
from jaxtrain.observe.formatting import abbreviated, format_count, format_duration
from jaxtrain.observe.live import LivePanel
from jaxtrain.observe.log_line import LOSS_SCALES, LogLine


class ProgressView(Protocol):
    """Receives the progress of the training loop."""

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        """Report that `step` is done; `line` holds its metrics if the step is logged."""

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Report the first rows of the tables of an evaluation, by tag; each has texts by column."""


_CELL = 48  # characters of a cell in a line


class Console:
    """Prints a run's messages, progress and summary.

    Args:
      rich: Console of the rich library to print on; standard output by default.
      wording: Changes the words of a message, such as `jaxtrain.errors.in_python`.
    """

    def __init__(self, rich: RichConsole | None = None, wording: Callable[[str], str] = str) -> None:
        self.wording = wording
        # rich takes a notebook's or a CI log's wish for colors for a terminal, and would redraw the panel line by line.
        self.rich = rich or RichConsole(highlight=False, force_terminal=None if sys.stdout.isatty() else False)

    def message(self, text: str) -> None:
        """Print one line."""
        self.rich.print(escape_unprintable(self.wording(text)), markup=False, soft_wrap=True)

    def headline(self, text: str) -> None:
        """Print the line that introduces a run."""
        self.message(text)

    def facts(self, rows: Mapping[str, str]) -> None:
        """Print names beside values."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(Text(escape_unprintable(name), style="dim"), Text(escape_unprintable(value)))
        self.rich.print(table)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Announce a phase when it begins and print its duration when it ends."""
        begin = time.perf_counter()
        if self.rich.is_terminal:
            with self.rich.status(text):
                yield
        else:
            self.message(f"{text} …")
            yield
        self.message(f"{text}: {time.perf_counter() - begin:.1f} s")

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Show the progress from step `start` to step `total`.

        Args:
          start: The last step already done.
          total: The last step of the run.
          unit: What throughput counts: "tokens" or "examples".

        Yields:
          A view; call its `advance` after every step.
        """
        if not self.rich.is_terminal:
            yield _LineProgress(self, start, total)
            return
        panel = LivePanel(start, total, unit)
        with Live(panel, console=self.rich, refresh_per_second=4):
            yield PanelProgress(self, panel)

    def summary(
        self,
        metrics: Sequence[LogLine | Mapping[str, Any]],
        references: Mapping[str, float],
        places: Mapping[str, str],
    ) -> None:
        """Print the curve of the validation loss, the best and the last evaluation, and where to find the results.

        Without evaluations the curve is that of the training loss.

        Args:
          metrics: The lines of metrics.jsonl.
          references: Losses that a useful model must beat, by name.
          places: Paths and commands, by name.
        """
        lines = [LogLine.of(line) for line in metrics]
        evaluations = [line for line in lines if line.has_finite_eval_loss]
        table = Table.grid(padding=(0, 2))
        if evaluations:
            best, last = min(evaluations, key=lambda line: line.evaluation["loss"]), evaluations[-1]
            table.add_row(Text("best evaluation", style="dim"), f"step {best.step}: {format_evaluation(best)}")
            table.add_row(Text("last evaluation", style="dim"), f"step {last.step}: {format_evaluation(last)}")
            points = [(line.step, line.evaluation["loss"]) for line in evaluations]
        else:
            points = [(line.step, line.loss) for line in lines if line.loss is not None and math.isfinite(line.loss)]
        if not points:
            return
        for name, value in {**{k: f"{v:.3f} (dotted)" for k, v in references.items()}, **places}.items():
            table.add_row(Text(escape_unprintable(name), style="dim"), Text(escape_unprintable(value)))
        drawing = Text(curve(points, references, width=max(20, min(self.rich.width - 14, 72))))
        title = f"{'validation' if evaluations else 'training'} loss{', nats' if references else ''}"
        self.rich.print(Panel(Group(drawing, Text(), table), title=title, box=box.ROUNDED))

    def sample(self, text: str) -> None:
        """Print a text generated by the model."""
        self.rich.print(Panel(Text(replace_unprintable(text)), title="sample", box=box.ROUNDED))


class _LineProgress:
    """Progress for logs and CI: one plain line per logged step."""

    def __init__(self, console: Console, start: int, total: int) -> None:
        self._console, self._start, self._total = console, start, total
        self._begin = time.perf_counter()

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        if not line:
            return
        line = LogLine.of(line)
        left = (time.perf_counter() - self._begin) / max(step - self._start, 1) * (self._total - step)
        parts = [f"step {step}/{self._total}", *_numbers(line), f"{format_duration(left)} left"]
        self._console.message("  ".join(parts))
        if line.evaluation:
            self._console.message(f"step {step}/{self._total}  evaluation: {format_evaluation(line)}")

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        for tag, row in rows.items():
            self._console.message(f"step {step}/{self._total}  {tag}: {format_row(row)}")


class PanelProgress:
    """Progress for a terminal: a live panel, and above it one line per evaluation."""

    def __init__(self, console: Console, panel: LivePanel) -> None:
        self._console, self._panel = console, panel

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        """Report that `step` is done."""
        line = LogLine.of(line) if line else None
        self._panel.advance(step, line)
        if line and line.evaluation:
            self._console.message(f"step {step}: {format_evaluation(line)}")

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Report the first rows of the tables of an evaluation."""
        self._panel.tables(step, rows)


def format_evaluation(line: LogLine) -> str:
    """Format the evaluation of a line."""
    loss = [] if line.eval_loss is None else [f"validation loss {line.eval_loss:.3f}"]
    metrics = [f"{name} {value:.4f}" for name, value in line.evaluation.items() if name != "loss"]
    return ", ".join([*loss, *metrics])


def format_row(row: Mapping[str, str]) -> str:
    """Format a row of a table in a line.

    >>> format_row({"prompt": "2 + 2 =", "generated": ""})
    "prompt '2 + 2 =' · generated ''"
    """
    return " · ".join(f"{column} {abbreviated(text, _CELL)!r}" for column, text in row.items())


def _numbers(line: LogLine) -> list[str]:
    """Format the numbers that the line holds: a user's own loop may measure only some."""
    shares = {"MFU": line.mfu, "GPU": line.gpu_utilization}
    numbers = {name: value for name, value in line.other.items() if isinstance(value, int | float)}
    of_layers = [numbers.pop(name) for name in [*numbers] if name.startswith(LOSS_SCALES)]
    parts = [
        None if line.loss is None else f"loss {line.loss:.3f}",
        *(f"{name} {value:.4g}" for name, value in numbers.items()),
        None if line.lr is None else f"lr {line.lr:.1e}",
        None if line.grad_norm is None else f"grad {line.grad_norm:.2f}",
        None if line.loss_scale in (None, 1) else f"scale {line.loss_scale:g}",
        f"layer scales {min(of_layers):g} to {max(of_layers):g}" if of_layers else None,
        f"skipped {line.skipped}" if line.skipped else None,
        f"{format_count(line.throughput.per_s)} {line.throughput.unit}/s" if line.throughput else None,
        *(f"{name} {value:.0%}" for name, value in shares.items() if value is not None),
        None if line.peak_memory_bytes is None else format_bytes(int(line.peak_memory_bytes)),
    ]
    return [part for part in parts if part]
