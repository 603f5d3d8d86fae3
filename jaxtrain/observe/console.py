"""The terminal: phases, facts, progress and the summary. Live on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxtrain.observe.curve import curve


class ProgressView(Protocol):
    """What the loop reports to."""

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        """`step` is done; `line` holds its metrics where it was logged, and is empty where it was not."""


class Console:
    """Where a run speaks to its user."""

    def __init__(self, rich: RichConsole | None = None) -> None:
        self.rich = rich or RichConsole(highlight=False)

    def message(self, text: str) -> None:
        """One line."""
        self.rich.print(text, markup=False, soft_wrap=True)

    def facts(self, rows: Mapping[str, str]) -> None:
        """Names beside values."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), Text(value))
        self.rich.print(table)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """A named wait: said as it begins, timed when it ends."""
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
        """A view of the steps from `start` to `total`."""
        if not self.rich.is_terminal:
            yield _Lines(self, start, total, unit)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        with Progress(*columns, console=self.rich, expand=True) as progress:
            yield _Bar(self, progress, start, total, unit)

    def summary(
        self, metrics: list[dict[str, Any]], references: Mapping[str, float], places: Mapping[str, str]
    ) -> None:
        """The curve, the best and the last evaluation, and where everything is."""
        evaluations = [m for m in metrics if m.get("eval_loss") is not None]
        if not evaluations:
            return
        best, last = min(evaluations, key=lambda m: m["eval_loss"]), evaluations[-1]
        points = [(m["step"], m["eval_loss"]) for m in evaluations]
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("best evaluation", style="dim"), f"step {best['step']}: {evaluated(best)}")
        table.add_row(Text("last evaluation", style="dim"), f"step {last['step']}: {evaluated(last)}")
        for name, value in {**{k: f"{v:.3f} (dotted)" for k, v in references.items()}, **places}.items():
            table.add_row(Text(name, style="dim"), Text(value))
        drawn = Text(curve(points, references, width=max(20, min(self.rich.width - 14, 72))))
        self.rich.print(Panel(Group(drawn, Text(), table), title="validation loss, nats", box=box.ROUNDED))

    def sample(self, text: str) -> None:
        """Text from the model."""
        self.rich.print(Panel(Text(text), title="a sample", box=box.ROUNDED))


class _Lines:
    """Progress for logs and CI: a plain line a logged step."""

    def __init__(self, console: Console, start: int, total: int, unit: str) -> None:
        self._console, self._start, self._total, self._unit = console, start, total, unit
        self._begin = time.perf_counter()

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        if not line:
            return
        left = (time.perf_counter() - self._begin) / (step - self._start) * (self._total - step)
        self._console.message(f"step {step}/{self._total}  {_numbers(line, self._unit)}  {_clock(left)} left")
        if "eval_loss" in line:
            self._console.message(f"step {step}/{self._total}  evaluation: {evaluated(line)}")


class _Bar:
    """Progress for a terminal: one live line, and a line kept an evaluation."""

    def __init__(self, console: Console, progress: Progress, start: int, total: int, unit: str) -> None:
        self._console, self._progress, self._unit = console, progress, unit
        self._task = progress.add_task("", total=total, completed=start, numbers="first step …")

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        if not line:
            self._progress.update(self._task, completed=step)
            return
        self._progress.update(self._task, completed=step, numbers=_numbers(line, self._unit))
        if "eval_loss" in line:
            self._console.message(f"step {step}: {evaluated(line)}")


def evaluated(line: Mapping[str, Any]) -> str:
    """The evaluation in a line of metrics, for a person."""
    others = [
        f"{k.removeprefix('eval_')} {v:.4f}" for k, v in line.items() if k.startswith("eval_") and k != "eval_loss"
    ]
    return ", ".join([f"validation loss {line['eval_loss']:.3f}", *others])


def _numbers(line: Mapping[str, Any], unit: str) -> str:
    scale = f"scale {line['loss_scale']:g}" if line["loss_scale"] != 1 else ""
    skips = f"skipped {line['skipped']}" if line["skipped"] else ""
    parts = [
        f"loss {line['loss']:.3f}",
        f"lr {line['lr']:.1e}",
        f"grad {line['grad_norm']:.2f}",
        scale,
        skips,
        f"{_short(line[f'{unit}_per_s'])} {unit}/s",
        f"{line['peak_memory_bytes'] / 2**20:.0f} MiB",
    ]
    return "  ".join(part for part in parts if part)


def _short(x: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.1f}{letter}"
    return f"{x:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
