"""Host memory of saving and restoring a sharded state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_processes import environment, free_address

LIMIT = 1.3
"""Bytes per byte of the part that a process owns, of which the part itself is 1 on a CPU."""

PROGRAM = """
import pathlib, sys
from jaxtrain.cpu.host_memory import keep_host_memory

keep_host_memory()  # as the commands do, before the other imports
from tests.distributed.checkpoint_memory import main

main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
"""


def measured(what: str, n: int, folder: Path) -> list[dict[str, int]]:
    """Return the bytes of each process's part of the state, and its peaks by phase."""
    own = environment(JAX_COORDINATOR_ADDRESS=free_address(), JAX_NUM_PROCESSES=str(n), JAX_NUM_CPU_DEVICES="1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(n), str(folder)], env=own, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("saving", "restoring"), [(3, 2), (8, 3)])
def test_no_process_needs_more_than_its_part_to_save_and_to_restore(
    saving: int, restoring: int, tmp_path: Path
) -> None:
    """No part of a process that saves is a part of one that restores."""
    for what, n, phases in (("save", saving, ("create", "save")), ("restore", restoring, ("restore",))):
        processes = measured(what, n, tmp_path)
        assert len(processes) == n
        largest = max(process["part"] for process in processes)
        ratios = {phase: [round(process[phase] / largest, 2) for process in processes] for phase in phases}
        assert all(0.9 <= min(found) <= max(found) <= LIMIT for found in ratios.values()), ratios
