"""Call a function in several processes of this machine."""

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
    """Call `work()` in one process for each environment and return the first result other than None.

    Each process has its environment in addition to this one's. `work` and its result must be picklable. The output of
    the processes goes to stderr.

    Raises:
      RuntimeError: A process failed; the others were stopped.
    """
    # Modules that can be imported here must be importable there.
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "work"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps(work))
        command = [sys.executable, "-m", "parity.distributed", str(asked), str(answer)]
        _run(command, [{**common, **extra} for extra in environments])
        return pickle.loads(answer.read_bytes())


def free_port() -> str:
    """Return a port that no process of this machine listens to."""
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
        raise RuntimeError(f"process {number} of {len(started)} exited with status {status}: the others were stopped")
