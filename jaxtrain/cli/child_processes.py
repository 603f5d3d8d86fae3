"""Processes of one command: forwarded output and signals, and the end of all when one fails."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import IO, NamedTuple

from jaxtrain.distributed import processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


class Ended(NamedTuple):
    """How the processes of a command ended."""

    status: int
    """0, the exit status of the first that failed, or 128 + its signal's number."""
    killed: int | None = None
    """The number of the first that failed if a signal ended it; None if it exited itself."""
    is_requested: bool = False
    """Whether a signal asked the command to end."""


class Processes:
    """A command run once per environment; when one fails, the others are terminated."""

    def __init__(self, command: list[str], environments: list[dict[str, str]], grace_seconds: float) -> None:
        self._command, self._environments, self._grace = command, environments, grace_seconds
        self._started: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._signals: list[signal.Signals] = []
        self._lock = threading.Lock()

    def run(self) -> Ended:
        """Start the processes and wait for all of them."""
        # A signal that is ignored, as SIGHUP by nohup, stays so.
        handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._receive) for number in handled}
        self._pipe, ended = os.pipe()
        try:
            for environment in self._environments:
                self._start(environment)
            return self._watch()
        finally:
            for process in self._started:  # with their children, which would keep the streams open
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join()
            os.close(self._pipe)
            os.close(ended)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            self._command,
            env={**environment, processes.LAUNCHER_PIPE: str(self._pipe)},
            pass_fds=[self._pipe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A terminal sends Ctrl-C to its whole session; these processes must receive it once, from here.
            start_new_session=True,
        )
        number = len(self._started)
        self._started.append(process)
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            thread = threading.Thread(target=self._forward, args=(number, stream, out), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _forward(self, number: int, stream: IO[bytes], out: IO[str]) -> None:
        """Forward the stream line by line, each prefixed with the process number."""
        with stream:
            for line in stream:
                with self._lock:
                    try:
                        out.write(f"[{number}] {line.decode(errors='replace').rstrip()}\n")
                        out.flush()
                    except OSError:  # the reader is gone: let the run save and stop
                        self._signals = self._signals or [signal.SIGTERM]

    def _watch(self) -> Ended:
        """Wait for all processes; terminate the others once one has failed."""
        failed, deadline, forwarded = None, float("inf"), 0
        while True:
            running = any(process.poll() is None for process in self._started)
            if failed is None and (failed := self._failed()):
                self._report(failed)
                self._send(signal.SIGTERM)
                deadline = time.monotonic() + self._grace
            if len(self._signals) > forwarded:
                # The first signal asks the run to save and stop; the second kills it.
                self._send(signal.SIGKILL if forwarded else self._signals[0])
                forwarded = len(self._signals)
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
        if failed:
            # An abort is a consequence of another process that hangs, and does not say which.
            is_killed = failed.returncode < 0 and failed.returncode != -signal.SIGABRT
            killed = self._started.index(failed) if is_killed else None
            return Ended(_status(failed), killed, is_requested=bool(self._signals))
        status = max(_status(process) for process in self._started)
        return Ended(128 + self._signals[0] if status and self._signals else status, is_requested=bool(self._signals))

    def _failed(self) -> subprocess.Popen[bytes] | None:
        """Return the process that failed first, if any ended other than by request."""
        # Exit statuses of a run that was asked to stop, by a signal of ours or by another process of the run.
        expected = {0, *(128 + number for number in _SIGNALS), *(-number for number in self._signals)}
        if self._signals:  # consequences of another process's end, or of a second signal
            expected |= {-signal.SIGABRT, -signal.SIGKILL}
        ended = [p for p in self._started if p.poll() is not None and p.returncode not in expected]
        # JAX's runtime aborts a process whose peer is gone, so an abort is a consequence.
        return min(ended, key=lambda p: p.returncode == -signal.SIGABRT, default=None)

    def _report(self, failed: subprocess.Popen[bytes]) -> None:
        code, number = failed.returncode, self._started.index(failed)
        how = f"exited with {code}" if code >= 0 else f"was terminated by {signal.Signals(-code).name}"
        if code == -signal.SIGABRT and (stopped := self._stopped()) is not None:
            number, how = stopped, f"is stopped by a signal, and process {number} waited for it in vain"
        which = f"process {number} of {len(self._started)}"
        with self._lock:
            print(f"jaxtrain: {which} {how}: terminating the others", file=sys.stderr, flush=True)

    def _stopped(self) -> int | None:
        """Return the number of a process that SIGSTOP or a debugger has stopped."""
        for number, process in enumerate(self._started):
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                    return number
        return None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        # The terminal has closed, if it is SIGHUP: save and stop.
        self._signals.append(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)


def _status(ended: subprocess.Popen[bytes]) -> int:
    """Return the exit status as a shell reports it."""
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
