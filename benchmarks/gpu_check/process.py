"""A command that cannot outlive its limit, with all processes that it has started."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


def run_limited(
    arguments: Sequence[str],
    limit_s: float,
    log: Path,
    on_result: Callable[[dict[str, Any]], None],
    environment: Mapping[str, str],
) -> str:
    """Run a Python command and pass on its results as they come.

    Args:
      arguments: Arguments of the Python interpreter.
      limit_s: Seconds after which it is killed, with its descendants, also those in groups of their own.
      log: File that everything else it prints is appended to.
      on_result: Called with each JSON object of a line of its standard output.
      environment: Its environment.

    Returns:
      "done", or in a line what went wrong.
    """
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            in_time = _pass_on(child, time.monotonic() + limit_s, file, on_result)
        finally:
            kill_tree(child.pid)
            with suppress(ProcessLookupError):  # those that it left behind are nobody's children any more
                os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
            if child.stdout is not None:
                child.stdout.close()
    if not in_time:
        return f"stopped after {limit_s:.0f} s"
    return "done" if status == 0 else f"failed: {_last_line(log) or f'exit status {status}'}"


def _pass_on(
    child: "subprocess.Popen[bytes]", deadline: float, file: BinaryIO, on_result: Callable[[dict[str, Any]], None]
) -> bool:
    """Read a process's output to its end; return whether it ended before the deadline."""
    assert child.stdout is not None
    unread = b""
    while child.poll() is None or select.select([child.stdout], [], [], 0)[0]:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not select.select([child.stdout], [], [], min(left, 0.5))[0]:
            continue
        chunk = os.read(child.stdout.fileno(), 1 << 16)
        if not chunk:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            return child.poll() is not None
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            _one_line(line, file, on_result)
    return True


def _one_line(line: bytes, file: BinaryIO, on_result: Callable[[dict[str, Any]], None]) -> None:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and "what" in found:
            on_result(found)
            return
    file.write(line + b"\n")
    file.flush()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    for found in [pid, *_descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # The name of the program, in parentheses, may contain spaces.
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found = list(children[pid])
    for one in found:  # which grows
        found += children[one]
    return found
