"""The output of a run in a notebook: one display, which is updated in place."""

import html
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole

from jaxtrain.observe.console import Console, PanelProgress, ProgressView
from jaxtrain.observe.live import LivePanel
from jaxtrain.observe.log_line import LogLine

_WIDTH = 96
_REDRAW_S = 0.25


def console_here(wording: Callable[[str], str] = str) -> Console:
    """Return the console for where this process prints: a notebook's cell, a terminal or a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if ipython and shell is not None and hasattr(shell, "kernel"):
        return NotebookConsole(ipython.display.display, wording)
    return Console(wording=wording)


class NotebookConsole(Console):
    """Prints into one display of a notebook: the lines so far, below them the panel of the progress.

    Args:
      display: `IPython.display.display`.
      wording: As for `Console`.
    """

    def __init__(self, display: Callable[..., Any], wording: Callable[[str], str] = str) -> None:
        self._cell = _Cell(display)
        super().__init__(RichConsole(file=self._cell, width=_WIDTH, highlight=False, force_terminal=False), wording)

    @contextmanager
    def progress(self, start: int, total: int, unit: str) -> Iterator[ProgressView]:
        """Show a panel until the progress ends, which then stays."""
        panel = LivePanel(start, total, unit)
        try:
            yield _CellProgress(self, panel, self._cell)
        finally:
            self._cell.below = ""
            self.rich.print(panel)


class _CellProgress(PanelProgress):
    """The progress of a terminal, whose panel is drawn into the display."""

    def __init__(self, console: Console, panel: LivePanel, cell: "_Cell") -> None:
        super().__init__(console, panel)
        self._cell, self._drawn = cell, 0.0

    def advance(self, step: int, line: LogLine | Mapping[str, Any] | None = None) -> None:
        super().advance(step, line)
        self._draw()

    def tables(self, step: int, rows: Mapping[str, Mapping[str, str]]) -> None:
        super().tables(step, rows)
        self._draw()

    def _draw(self) -> None:
        if time.perf_counter() - self._drawn < _REDRAW_S:
            return
        self._drawn = time.perf_counter()
        text = RichConsole(file=io.StringIO(), width=_WIDTH, highlight=False, force_terminal=False)
        text.print(self._panel)
        self._cell.below = text.file.getvalue()  # type: ignore[attr-defined]
        self._cell.flush()


class _Cell(io.StringIO):
    """A text file whose content a display shows."""

    def __init__(self, display: Callable[..., Any]) -> None:
        super().__init__()
        self.below = ""
        self._display, self._handle, self._shown = display, None, ""

    def flush(self) -> None:
        text = self.getvalue() + self.below
        if text == self._shown:
            return
        self._shown = text
        style = "line-height: 1.2; white-space: pre; overflow-x: auto"
        shown = {"text/plain": text, "text/html": f'<pre style="{style}">{html.escape(text)}</pre>'}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
