"""Stop on Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, after the current step is finished and saved."""

import contextlib
import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxtrain.distributed import processes

_OTHERS = (signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM requests a stop; a second one ends the process immediately.

    So do SIGHUP, of a terminal that closes, and SIGUSR1, which Slurm sends before a time limit, unless they are ignored
    or have a handler already.

    With several processes a signal to any of them stops all after the same step. JAX's runtime coordinates that and
    handles SIGTERM itself: a second one has no effect.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handled = [signal.SIGINT, signal.SIGTERM] if processes.count() == 1 else [signal.SIGINT]
        if threading.current_thread() is not threading.main_thread():
            self._handled = []  # Python handles signals in the main thread only
        self._previous: dict[signal.Signals, Any] = {}
        self._handled += [number for number in _OTHERS if self._handled and signal.getsignal(number) == signal.SIG_DFL]

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
        """Whether to stop after this step. Call it after every step; all processes get the same answer."""
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
        _leave_closed_terminal()
        # The default action of the system ends the process even while it waits for the device; Python's own, an
        # exception, would wait on the way out.
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)
        if processes.count() > 1:
            signal.raise_signal(signal.SIGTERM)  # notifies the runtime of all processes
        if os.isatty(1):
            # Show the cursor that the progress bar has hidden. Written past Python's buffer, which the signal may have
            # interrupted.
            os.write(1, b"\x1b[?25h")


def _leave_closed_terminal() -> None:
    """Discard the output of streams whose other end is closed: writing would end the run before it is saved."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    with contextlib.suppress(OSError):
        for stream, event in poll.poll(0):
            if event & (select.POLLHUP | select.POLLERR):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
