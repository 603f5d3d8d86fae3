"""`jaxtrain launch -n N -- train …`: train in several processes on this machine."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import tyro

from jaxtrain.cli.flags import parse
from jaxtrain.debug import PLUGINS, installed_versions
from jaxtrain.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Launch:
    """Run the command after --, `jaxtrain train …`, in several cooperating processes on this machine."""

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """Number of processes."""
    devices_per_process: int | None = None
    """Devices per process: virtual CPU devices, 1 by default, or GPUs, an even share by default."""
    grace_seconds: float = 20.0
    """Seconds from SIGTERM to SIGKILL for the other processes after one has failed."""


def main(args: list[str]) -> int:
    """Start the processes, forward their output and incoming signals; return the status of the first that failed."""
    flags, command = _split(args)
    launch = parse(Launch(), flags, "jaxtrain launch")
    if launch.processes < 1:
        raise UserError(f"--processes must be positive, got {launch.processes}: use -n 2 for two processes")
    if launch.devices_per_process is not None and launch.devices_per_process < 1:
        raise UserError(f"--devices-per-process must be positive, got {launch.devices_per_process}: use 1 or more")
    if not launch.grace_seconds >= 0:
        raise UserError(f"--grace-seconds must not be negative, got {launch.grace_seconds}: use 0 or more")
    if command[:1] != ["train"]:
        got = command[0] if command else "nothing"
        raise UserError(f"the command after -- must be train, got {got}: use jaxtrain launch -n 2 -- train …")
    environments = [{**os.environ, **extra} for extra in _settings(launch, os.environ, _gpus(os.environ))]
    return Processes([sys.executable, "-m", "jaxtrain.cli", *command], environments, launch.grace_seconds).run()


class Processes:
    """A command run once per environment; when one fails, the others are terminated and its status returned."""

    def __init__(self, command: list[str], environments: list[dict[str, str]], grace_seconds: float) -> None:
        self._command, self._environments, self._grace = command, environments, grace_seconds
        self._started: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._signals: list[signal.Signals] = []
        self._lock = threading.Lock()

    def run(self) -> int:
        """Wait for all processes; return 0, the exit status of the first that failed, or 128 + its signal's number."""
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
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
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            self._command,
            env=environment,
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
        for line in stream:
            with self._lock:
                try:
                    out.write(f"[{number}] {line.decode(errors='replace').rstrip()}\n")
                    out.flush()
                except OSError:  # the reader is gone: let the run save and stop
                    self._signals = self._signals or [signal.SIGTERM]

    def _watch(self) -> int:
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
            return _status(failed)
        status = max(_status(process) for process in self._started)
        return 128 + self._signals[0] if status and self._signals else status

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
        code = failed.returncode
        how = f"exited with {code}" if code >= 0 else f"was terminated by {signal.Signals(-code).name}"
        which = f"process {self._started.index(failed)} of {len(self._started)}"
        with self._lock:
            print(f"jaxtrain: {which} {how}: terminating the others", file=sys.stderr, flush=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals.append(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)


def _status(ended: subprocess.Popen[bytes]) -> int:
    """Return the exit status as a shell reports it."""
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at --."""
    if "--" not in args:
        if "train" in args:
            raise UserError("the command is not separated by --: use jaxtrain launch -n 2 -- train …")
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _settings(launch: Launch, environment: Mapping[str, str], gpus: int) -> list[dict[str, str]]:
    """Return the environment variables to add to `environment` for each process; `gpus` is the number of visible GPUs.

    Raises `UserError` if the GPUs cannot be divided among the processes.
    """
    n, each = launch.processes, launch.devices_per_process
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(n),
        # Unbuffered output, at the width left beside the prefix.
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns - len(f"[{n - 1}] ")),
    }
    if not gpus:
        common["JAX_NUM_CPU_DEVICES"] = str(each or 1)
    elif each is None and gpus % n:
        raise UserError(
            f"{gpus} GPUs are not divisible by {n} processes: use another number, or set --devices-per-process"
        )
    elif n * (each or 1) > gpus:
        raise UserError(
            f"{n} processes of {each or 1} GPUs need {n * (each or 1)}, but {gpus} are visible: use fewer processes"
        )
    share = each or gpus // n
    ids = [",".join(map(str, range(i * share, (i + 1) * share))) for i in range(n)]
    return [
        {**common, "JAX_PROCESS_ID": str(i), **({"JAX_LOCAL_DEVICE_IDS": ids[i]} if gpus else {})} for i in range(n)
    ]


def _gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs JAX would find, without initializing JAX, which would allocate their memory."""
    if not installed_versions(PLUGINS) or environment.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return 0
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
