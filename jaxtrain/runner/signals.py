"""Ctrl-C and SIGTERM as a wish to stop: the step at hand is finished and saved first."""

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
        self._restore()

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it; 0 without one."""
        return 0 if self.received is None else 128 + self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
