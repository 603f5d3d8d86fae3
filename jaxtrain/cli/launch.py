"""`jaxtrain launch -n N -- train …`: train in several processes on this machine, restarted when one fails."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxtrain.cli.child_processes import Ended, Processes
from jaxtrain.debug import PLUGINS, installed_versions
from jaxtrain.errors import UserError
from jaxtrain.flags import Flag, parse


@dataclass(frozen=True)
class Launch:
    """Run the command after --, `jaxtrain train …`, in several cooperating processes on this machine."""

    processes: Annotated[str, Flag(short="-n", metavar="N|MIN:MAX")] = "0"
    """Number of processes; with MIN:MAX, a restart continues without a process that was killed, down to MIN."""
    max_restarts: int = 0
    """Restart all processes, from the last checkpoint, at most this often after one has failed."""
    devices_per_process: int | None = None
    """Devices per process: virtual CPU devices, 1 by default, or GPUs, an even share by default."""
    grace_seconds: float = 20.0
    """Seconds from SIGTERM to SIGKILL for the other processes after one has failed."""


def main(args: list[str]) -> int:
    """Start the processes, forward their output and incoming signals; return the status of the first that failed."""
    flags, command = _split(args)
    launch = parse(Launch(), flags, "jaxtrain launch")
    least, most = _bounds(launch.processes)
    if launch.devices_per_process is not None and launch.devices_per_process < 1:
        raise UserError(f"--devices-per-process must be positive, got {launch.devices_per_process}: use 1 or more")
    if not launch.grace_seconds >= 0:
        raise UserError(f"--grace-seconds must not be negative, got {launch.grace_seconds}: use 0 or more")
    if launch.max_restarts < 0:
        raise UserError(f"--max-restarts must not be negative, got {launch.max_restarts}: use 0 or more")
    if command[:1] != ["train"]:
        got = command[0] if command else "nothing"
        raise UserError(f"the command after -- must be train, got {got}: use jaxtrain launch -n 2 -- train …")
    places = _places(most, launch.devices_per_process, _gpus(os.environ))
    return _run(launch, command, places, least)


def _run(launch: Launch, command: list[str], places: list[dict[str, str]], least: int) -> int:
    """Run the command in a process for each place, and again after failures, without the places of killed processes."""
    restarts = 0
    while True:
        environments = [{**os.environ, **settings} for settings in _settings(places)]
        ended = Processes([sys.executable, "-m", "jaxtrain.cli", *command], environments, launch.grace_seconds).run()
        if ended.killed is not None and len(places) > least:
            del places[ended.killed]
        if not _is_restarted(ended) or restarts == launch.max_restarts:
            return ended.status
        restarts += 1
        if not any(flag.partition("=")[0] == "--resume" for flag in command):
            command = [*command, "--resume", "auto"]
        print(
            f"jaxtrain: restart {restarts} of {launch.max_restarts}, with {len(places)} processes",
            file=sys.stderr,
            flush=True,
        )


def _is_restarted(ended: Ended) -> bool:
    """Whether a restart may help: not after success, a request to stop or wrong usage."""
    return ended.status not in (0, UserError.exit_status) and not ended.is_requested


def _bounds(processes: str) -> tuple[int, int]:
    """Return the least and the largest number of processes of N or MIN:MAX."""
    least, _, most = processes.rpartition(":")
    bounds = [int(part) if part.isdecimal() else 0 for part in (least or most, most)]
    if not 1 <= bounds[0] <= bounds[1]:
        raise UserError(
            f"--processes must be a positive number or MIN:MAX, got {processes}: use -n 2 for two processes"
        )
    return bounds[0], bounds[1]


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at --."""
    if "--" not in args:
        if "train" in args:
            raise UserError("the command is not separated by --: use jaxtrain launch -n 2 -- train …")
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _places(n: int, each: int | None, gpus: int) -> list[dict[str, str]]:
    """Return the environment variables of `n` processes that give them their devices.

    Args:
      n: Number of processes.
      each: Devices of a process; None for an even share of the GPUs, or one virtual device of the CPU.
      gpus: Number of visible GPUs.

    Raises:
      UserError: The GPUs cannot be divided among the processes.
    """
    if not gpus:
        return [{"JAX_NUM_CPU_DEVICES": str(each or 1)} for _ in range(n)]
    if each is None and gpus % n:
        raise UserError(
            f"{gpus} GPUs are not divisible by {n} processes: use another number, or set --devices-per-process"
        )
    if n * (each or 1) > gpus:
        raise UserError(
            f"{n} processes of {each or 1} GPUs need {n * (each or 1)}, but {gpus} are visible: use fewer processes"
        )
    share = each or gpus // n
    return [{"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(i * share, (i + 1) * share)))} for i in range(n)]


def _settings(places: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the environment variables of processes that connect to each other, one for each place."""
    n = len(places)
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
    return [{**common, **place, "JAX_PROCESS_ID": str(i)} for i, place in enumerate(places)]


def _gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs JAX would find, without initializing JAX, which would allocate their memory."""
    if not installed_versions(PLUGINS) or environment.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return 0
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
