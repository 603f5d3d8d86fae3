"""The panel that a terminal shows while a run trains."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import format_bytes
from jaxtrain.observe.curve import sparkline
from jaxtrain.observe.formatting import abbreviated, format_count, format_duration
from jaxtrain.observe.log_line import LogLine

_SPARKLINE = 32  # width of the curve: the latest logged losses
_WAITING = 0.1  # share of a step spent waiting for its batch, from which on it is shown


class LivePanel:
    """The run's progress and its latest metrics, rendered whenever rich asks."""

    def __init__(self, start: int, total: int, unit: str) -> None:
        self._start, self._total, self._unit = start, total, unit
        self._step, self._begin = start, time.perf_counter()
        self._losses: deque[float] = deque(maxlen=_SPARKLINE)
        self._skipped = 0
        self._line: LogLine | None = None
        self._best: tuple[float, int] | None = None
        self._tables: tuple[int, Mapping[str, Mapping[str, str]]] = 0, {}

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        """Report that `step` is done; `line` holds its metrics if the step is logged."""
        self._step = step
        if not line:
            return
        self._line = line = LogLine.of(line)
        self._skipped += line.skipped or 0
        if line.loss is not None and math.isfinite(line.loss):
            self._losses.append(line.loss)
        loss = line.eval_loss
        if loss is not None and math.isfinite(loss) and (self._best is None or loss < self._best[0]):
            self._best = loss, step

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Report the first rows of the tables of an evaluation, by tag; each has texts by column."""
        self._tables = step, rows

    def __rich__(self) -> RenderableType:
        rows = [self._progress()]
        if self._line:
            rows += [self._loss(self._line), _facts(self._optimization(self._line)), _facts(self._speed(self._line))]
        step, tables = self._tables
        for tag, row in tables.items():
            rows += [Text(f"{tag}, step {step:,}", style="dim"), _row(row)]
        return Panel(Group(*rows), box=box.ROUNDED, border_style="dim")

    def _progress(self) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        share = (self._step - self._start) / max(self._total - self._start, 1)
        elapsed = time.perf_counter() - self._begin
        left = f"{format_duration(elapsed / share - elapsed)} left" if share else "first step …"
        steps = Text(f"step {self._step:,} of {self._total:,}", style="bold")
        row.add_row(steps, ProgressBar(total=self._total, completed=self._step, complete_style="cyan"), Text(left))
        return row

    def _loss(self, line: LogLine) -> RenderableType:
        text = Text()
        if line.loss is not None:
            text.append("loss ", style="dim").append(f"{line.loss:.4g}", style="bold")
        text.append(f"  {sparkline(list(self._losses), _SPARKLINE)}", style="cyan")
        if self._best:
            text.append("  best validation ", style="dim").append(f"{self._best[0]:.4g}")
            text.append(f" at step {self._best[1]:,}", style="dim")
        return text

    def _optimization(self, line: LogLine) -> dict[str, str]:
        facts = {"lr": "set by the optimizer" if line.lr is None else f"{line.lr:.2e}"}
        if line.grad_norm is not None:
            facts["grad norm"] = f"{line.grad_norm:.3g}"
        if line.loss_scale not in (None, 1):
            facts["scale"] = f"{line.loss_scale:g}"
        if self._skipped:
            facts["skipped"] = f"{self._skipped:,}"
        return facts

    def _speed(self, line: LogLine) -> dict[str, str]:
        facts = {f"{line.throughput.unit}/s": format_count(line.throughput.per_s)} if line.throughput else {}
        shares = {"MFU": line.mfu, "GPU": line.gpu_utilization}
        facts |= {name: f"{share:.0%}" for name, share in shares.items() if share is not None}
        if line.peak_memory_bytes is not None:
            facts["memory"] = format_bytes(int(line.peak_memory_bytes))
        waiting = (line.input_wait_s or 0.0) / line.step_time_s if line.step_time_s else 0.0
        if waiting > _WAITING:
            facts["waiting for input"] = f"{waiting:.0%}"
        return facts


class _Abbreviated(NamedTuple):
    """A text that is shown without its middle where it is wider than its place."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(abbreviated(self.text, options.max_width), no_wrap=True, overflow="ellipsis")


def _row(row: Mapping[str, str]) -> RenderableType:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for column, text in row.items():
        table.add_row(Text(column), _Abbreviated(text))
    return table


def _facts(facts: Mapping[str, str]) -> RenderableType:
    parts = [Text.assemble((f"{name} ", "dim"), value) for name, value in facts.items()]
    return Text("   ").join(parts)
