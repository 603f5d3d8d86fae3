"""A function called in several processes of this machine."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.05


def in_processes(work: Callable[[], Any], environments: Sequence[Mapping[str, str]]) -> Any:
    """What `work()` returned where it returned anything but None, of a process for each of `environments`.

    These are set besides this process's own. `work` and what it returns are what `pickle` takes. Where a process fails
    the others are ended, and a `RuntimeError` is raised; what they had to say is on stderr.
    """
    # What can be imported here is to be found there.
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "work"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps(work))
        command = [sys.executable, "-m", "parity.distributed", str(asked), str(answer)]
        _run(command, [{**common, **extra} for extra in environments])
        return pickle.loads(answer.read_bytes())


def free_port() -> str:
    """One that nobody on this machine listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _run(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for environment in environments:
            started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        while None in (ended := [process.poll() for process in started]) and not any(ended):
            time.sleep(_LOOK_SECONDS)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(ended):
        number, status = next((i, status) for i, status in enumerate(ended) if status)
        raise RuntimeError(f"process {number} of {len(started)} ended with {status}: the others were ended")
