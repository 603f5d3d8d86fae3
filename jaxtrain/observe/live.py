"""The panel that a terminal shows while a run trains."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain.cost import shown_bytes
from jaxtrain.observe.curve import sparkline
from jaxtrain.observe.formatting import format_count, format_duration

_SPARK = 32  # logged losses in the curve, the latest
# Of a step, spent waiting for its batch: from here on worth a word.
_WAITING = 0.1


class LivePanel:
    """The run's progress and its latest numbers, drawn anew whenever rich asks."""

    def __init__(self, start: int, total: int, unit: str) -> None:
        self._start, self._total, self._unit = start, total, unit
        self._step, self._begin = start, time.perf_counter()
        self._losses: deque[float] = deque(maxlen=_SPARK)
        self._skipped = 0
        self._line: Mapping[str, Any] = {}
        self._best: tuple[float, int] | None = None

    def advance(self, step: int, line: Mapping[str, Any]) -> None:
        """`step` is done; `line` holds its metrics where it was logged."""
        self._step = step
        if not line:
            return
        self._line = line
        self._skipped += line["skipped"]
        if math.isfinite(line["loss"]):
            self._losses.append(line["loss"])
        loss = line.get("eval_loss", math.nan)
        if math.isfinite(loss) and (self._best is None or loss < self._best[0]):
            self._best = loss, step

    def __rich__(self) -> RenderableType:
        rows = [self._progress()]
        if self._line:
            rows += [self._loss(), _facts(self._settings()), _facts(self._speed())]
        return Panel(Group(*rows), box=box.ROUNDED, border_style="dim")

    def _progress(self) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        share = (self._step - self._start) / max(self._total - self._start, 1)
        passed = time.perf_counter() - self._begin
        left = f"{format_duration(passed / share - passed)} left" if share else "first step …"
        steps = Text(f"step {self._step:,} of {self._total:,}", style="bold")
        row.add_row(steps, ProgressBar(total=self._total, completed=self._step, complete_style="cyan"), Text(left))
        return row

    def _loss(self) -> RenderableType:
        text = Text.assemble(("loss ", "dim"), (f"{self._line['loss']:.4g}", "bold"))
        text.append(f"  {sparkline(list(self._losses), _SPARK)}", style="cyan")
        if self._best:
            text.append("  best validation ", style="dim").append(f"{self._best[0]:.4g}")
            text.append(f" at step {self._best[1]:,}", style="dim")
        return text

    def _settings(self) -> dict[str, str]:
        line = self._line
        scale = {"scale": f"{line['loss_scale']:g}"} if line["loss_scale"] != 1 else {}
        skipped = {"skipped": f"{self._skipped:,}"} if self._skipped else {}
        return {"lr": _rate(line), "grad norm": f"{line['grad_norm']:.3g}", **scale, **skipped}

    def _speed(self) -> dict[str, str]:
        line = self._line
        shares = {"mfu": "MFU", "gpu_utilisation": "GPU"}
        waited = line.get("input_wait_s", 0.0) / line["step_time_s"]
        return {
            f"{self._unit}/s": format_count(line[f"{self._unit}_per_s"]),
            **{name: f"{line[key]:.0%}" for key, name in shares.items() if key in line},
            "memory": shown_bytes(line["peak_memory_bytes"]),
            **({"waiting for input": f"{waited:.0%}"} if waited > _WAITING else {}),
        }


def _rate(line: Mapping[str, Any]) -> str:
    return f"{line['lr']:.2e}" if "lr" in line else "its own"


def _facts(of: Mapping[str, str]) -> RenderableType:
    parts = [Text.assemble((f"{name} ", "dim"), value) for name, value in of.items()]
    return Text("   ").join(parts)
