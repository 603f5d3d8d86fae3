"""`jaxtrain launch -n N -- train …`: train in several processes on this machine."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxtrain.cli.flags import parse
from jaxtrain.cli.processes import Processes
from jaxtrain.debug import PLUGINS, installed_versions
from jaxtrain.errors import UserError


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
