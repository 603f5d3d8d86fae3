"""Ctrl-C and SIGTERM as a wish to stop: the step at hand is finished and saved first."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """Within it, the first SIGINT or SIGTERM is remembered in `received`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it; 0 without one."""
        return 0 if self.received is None else 128 + self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        # The system's own action ends the process even while it waits for the device. To Python's, for Ctrl-C an
        # exception, every wait on the way out would be an obstacle.
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        if os.isatty(1):
            # The cursor, hidden by the progress bar: nobody would show it then. Past Python's buffer, which this
            # may have interrupted.
            os.write(1, b"\x1b[?25h")
