"""`jaxtrain launch -n N -- train …`: a run in several processes on this machine."""

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

from jaxtrain.cli.arguments import parse
from jaxtrain.debug import PLUGINS, installed
from jaxtrain.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Launch:
    """Run `jaxtrain train …`, given after --, in several processes of this machine that compute as one."""

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """How many."""
    devices_per_process: int | None = None
    """Devices to each: of the CPU, as many virtual ones, 1 by default; of the GPUs, an even share by default."""
    grace_seconds: float = 20.0
    """From SIGTERM to SIGKILL, for the others where one has failed."""


def main(args: list[str]) -> int:
    """Start the processes, pass on what they say and the signals that come; the status of the first that failed."""
    options, command = _split(args)
    launch = parse(Launch(), options, "jaxtrain launch")
    if launch.processes < 1:
        raise UserError(f"{launch.processes} processes: say how many, 1 or more, as in jaxtrain launch -n 2 -- train")
    if launch.devices_per_process is not None and launch.devices_per_process < 1:
        raise UserError(f"devices_per_process is {launch.devices_per_process}: make it 1 or more")
    if not launch.grace_seconds >= 0:
        raise UserError(f"grace_seconds is {launch.grace_seconds}: make it 0 or more")
    if command[:1] != ["train"]:
        asked = command[0] if command else "nothing"
        raise UserError(f"{asked} cannot be launched: give train after --, as in jaxtrain launch -n 2 -- train")
    environments = [{**os.environ, **extra} for extra in _settings(launch, os.environ, _gpus(os.environ))]
    return Processes([sys.executable, "-m", "jaxtrain.cli", *command], environments, launch.grace_seconds).run()


class Processes:
    """A command run once in each environment: when the first fails the others are ended, and its status is theirs."""

    def __init__(self, command: list[str], environments: list[dict[str, str]], grace_seconds: float) -> None:
        self._command, self._environments, self._grace = command, environments, grace_seconds
        self._started: list[subprocess.Popen[bytes]] = []
        self._said: list[threading.Thread] = []
        self._signals: list[signal.Signals] = []
        self._lock = threading.Lock()

    def run(self) -> int:
        """Until all have ended: 0, the exit status of the first that failed, or 128 + the number of its signal."""
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            for environment in self._environments:
                self._start(environment)
            return self._watch()
        finally:
            for process in self._started:  # with what they have started, which would hold on to the streams
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for thread in self._said:
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
            # A terminal's Ctrl-C goes to all of a session: theirs is to come from here, once.
            start_new_session=True,
        )
        number = len(self._started)
        self._started.append(process)
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            thread = threading.Thread(target=self._pass_on, args=(number, stream, out), daemon=True)
            thread.start()
            self._said.append(thread)

    def _pass_on(self, number: int, stream: IO[bytes], out: IO[str]) -> None:
        """Line by line, each with the number of its process."""
        for line in stream:
            with self._lock:
                try:
                    out.write(f"[{number}] {line.decode(errors='replace').rstrip()}\n")
                    out.flush()
                except OSError:  # nobody reads any more: the run is to save and stop
                    self._signals = self._signals or [signal.SIGTERM]

    def _watch(self) -> int:
        """Until all have ended; the others by us, once one has failed."""
        failed, deadline, passed_on = None, float("inf"), 0
        while True:
            running = any(process.poll() is None for process in self._started)
            if failed is None and (failed := self._failed()):
                self._tell(failed)
                self._send(signal.SIGTERM)
                deadline = time.monotonic() + self._grace
            if len(self._signals) > passed_on:
                # The first asks the run to save and stop; after a second one nothing is waited for.
                self._send(signal.SIGKILL if passed_on else self._signals[0])
                passed_on = len(self._signals)
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            if not running:
                break
            time.sleep(_LOOK_SECONDS)
        if failed:
            return _status(failed)
        status = max(_status(process) for process in self._started)
        return 128 + self._signals[0] if status and self._signals else status

    def _failed(self) -> subprocess.Popen[bytes] | None:
        """Of those that have ended otherwise than they were asked to, the one that began it."""
        # A run that was asked to stop, by whatever way it came to know of it, says so by its status.
        asked = {0, *(128 + number for number in _SIGNALS), *(-number for number in self._signals)}
        if self._signals:  # what follows from another's end, or from a second signal
            asked |= {-signal.SIGABRT, -signal.SIGKILL}
        ended = [p for p in self._started if p.poll() is not None and p.returncode not in asked]
        # JAX's runtime aborts a process whose peer is gone.
        return min(ended, key=lambda p: p.returncode == -signal.SIGABRT, default=None)

    def _tell(self, failed: subprocess.Popen[bytes]) -> None:
        code = failed.returncode
        how = f"exited with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        which = f"process {self._started.index(failed)} of {len(self._started)}"
        with self._lock:
            print(f"jaxtrain: {which} {how}: the others are ended", file=sys.stderr, flush=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals.append(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)


def _status(ended: subprocess.Popen[bytes]) -> int:
    """As a shell reports it."""
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """What is before -- and what is after it."""
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _settings(launch: Launch, environment: Mapping[str, str], gpus: int) -> list[dict[str, str]]:
    """What each process finds set besides `environment`, on a machine with so many GPUs visible.

    Raises `UserError` where they cannot be shared out.
    """
    n, each = launch.processes, launch.devices_per_process
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(n),
        # What is said is passed on when it is said, as wide as it will be shown.
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns - len(f"[{n - 1}] ")),
    }
    if not gpus:
        common["JAX_NUM_CPU_DEVICES"] = str(each or 1)
    elif each is None and gpus % n:
        raise UserError(
            f"{gpus} GPUs cannot be shared evenly by {n} processes: launch another number, or set --devices-per-process"
        )
    elif n * (each or 1) > gpus:
        raise UserError(
            f"{n} processes of {each or 1} GPUs each need {n * (each or 1)} and {gpus} are visible: launch fewer"
        )
    share = each or gpus // n
    ids = [",".join(map(str, range(i * share, (i + 1) * share))) for i in range(n)]
    return [
        {**common, "JAX_PROCESS_ID": str(i), **({"JAX_LOCAL_DEVICE_IDS": ids[i]} if gpus else {})} for i in range(n)
    ]


def _gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs JAX would find, without asking it: it would take their memory."""
    if not installed(PLUGINS) or environment.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return 0
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
