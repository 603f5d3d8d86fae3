"""The terminal: phases, facts, progress and the summary. Live on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import shown_bytes
from jaxtrain.observe.curve import curve
from jaxtrain.observe.formatting import format_count, format_duration
from jaxtrain.observe.live import LivePanel


class ProgressView(Protocol):
    """What the loop reports to."""

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        """`step` is done; `line` holds its metrics where it was logged, and is empty where it was not."""


class Console:
    """Where a run speaks to its user."""

    def __init__(self, rich: RichConsole | None = None) -> None:
        # Of a notebook's and of some logs' wish for colours rich makes a terminal: a panel redrawn line after line.
        self.rich = rich or RichConsole(highlight=False, force_terminal=None if sys.stdout.isatty() else False)

    def message(self, text: str) -> None:
        """One line."""
        self.rich.print(text, markup=False, soft_wrap=True)

    def headline(self, text: str) -> None:
        """What begins."""
        self.message(text)

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
        panel = LivePanel(start, total, unit)
        with Live(panel, console=self.rich, refresh_per_second=4):
            yield _Panel(self, panel)

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
        self._console.message(f"step {step}/{self._total}  {_numbers(line, self._unit)}  {format_duration(left)} left")
        if "eval_loss" in line:
            self._console.message(f"step {step}/{self._total}  evaluation: {evaluated(line)}")


class _Panel:
    """Progress for a terminal: a live panel, and above it a line kept an evaluation."""

    def __init__(self, console: Console, panel: LivePanel) -> None:
        self._console, self._panel = console, panel

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        self._panel.advance(step, line)
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
        f"lr {line['lr']:.1e}" if "lr" in line else "",
        f"grad {line['grad_norm']:.2f}",
        scale,
        skips,
        f"{format_count(line[f'{unit}_per_s'])} {unit}/s",
        *(f"{name} {line[key]:.0%}" for key, name in (("mfu", "MFU"), ("gpu_utilisation", "GPU")) if key in line),
        shown_bytes(line["peak_memory_bytes"]),
    ]
    return "  ".join(part for part in parts if part)
