"""Ctrl-C and SIGTERM as a wish to stop: the step at hand is finished and saved first."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxtrain.distributed import processes


class StopSignals:
    """Within it, the first SIGINT or SIGTERM is a wish to stop; a second one ends the process at once.

    Of several processes any may be given it, and all then stop after the same step. JAX's runtime sees to that, and
    has SIGTERM to itself: a second one changes nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handled = [signal.SIGINT, signal.SIGTERM] if processes.count() == 1 else [signal.SIGINT]
        if threading.current_thread() is not threading.main_thread():
            self._handled = []  # Python gives signals to the main thread alone
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in self._handled:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wanted(self, step: int) -> bool:
        """Whether to stop after this step: asked after every one, and answered alike in all processes."""
        if processes.count() > 1 and reached_preemption_sync_point(step):
            self.received = self.received or signal.SIGTERM
            return True
        return processes.count() == 1 and self.received is not None

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
        if processes.count() > 1:
            signal.raise_signal(signal.SIGTERM)  # by which the runtime is told
        if os.isatty(1):
            # The cursor, hidden by the progress bar: nobody would show it then. Past Python's buffer, which this
            # may have interrupted.
            os.write(1, b"\x1b[?25h")
