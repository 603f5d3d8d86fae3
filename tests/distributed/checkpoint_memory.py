"""Measure the host memory of processes that save or restore a sharded state; each has one device, a part of the CPU.

`main` prints a JSON object for each process: the bytes of its part of the state, and the peaks of its anonymous and
shared memory while it creates, saves or restores the state. What a process has after saving and restoring a tiny state
is subtracted. On a CPU the peaks include the memory of the device, so that they are at least the part.
"""

import contextlib
import json
import mmap
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jaxtrain.distributed import make_mesh, processes, shard
from jaxtrain.runner.checkpoint import Checkpoints
from jaxtrain.step import Loss, TrainState, TrainStep, train_step

LAYERS, ROWS, COLUMNS = 16, 24 * 128, 1024
TINY = 24 * 8, 2
PHASES = IDLE, CREATE, SAVE, RESTORE = "idle", "create", "save", "restore"
Enter = Callable[[str], None]


def make_step(n: int) -> TrainStep:
    return shard(
        train_step(lambda params, batch, rng: (Loss(0.0, weight=1), {}), optax.adamw(1e-3)), make_mesh(f"fsdp={n}")
    )


def params(rows: int, columns: int) -> dict[str, jax.Array]:
    return {f"layer-{i}": jnp.full((rows, columns), i, jnp.float32) for i in range(LAYERS)}


def part_bytes(state: TrainState) -> int:
    return sum(part.data.nbytes for x in jax.tree.leaves(state) for part in x.addressable_shards)


def save(step: TrainStep, path: Path, rows: int, columns: int, enter: Enter) -> int:
    enter(CREATE)
    state = jax.block_until_ready(step.init(lambda: params(rows, columns)))
    enter(IDLE)
    with Checkpoints(path) as checkpoints:
        enter(SAVE)
        checkpoints.save(state, {})
        checkpoints.wait()
    enter(IDLE)
    return part_bytes(state)


def restore(step: TrainStep, path: Path, rows: int, columns: int, enter: Enter) -> int:
    like = step.shapes(lambda: params(rows, columns))
    with Checkpoints(path) as checkpoints:
        enter(RESTORE)
        state = jax.block_until_ready(checkpoints.restore(like)[0])
    enter(IDLE)
    for i in range(LAYERS):
        assert all((part.data == i).all() for part in state.params[f"layer-{i}"].addressable_shards)
    return part_bytes(state)


def run(what: str, n: int, folder: Path, enter: Enter) -> int:
    """Save or restore in one process; return the bytes of its part."""
    with processes.process_group():
        step = make_step(n)
        save(step, folder / f"tiny-{what}", *TINY, lambda phase: None)
        restore(step, folder / f"tiny-{what}", *TINY, lambda phase: None)
        processes.once(lambda: None)
        enter(IDLE)
        time.sleep(0.2)  # for the baseline
        part = {SAVE: save, RESTORE: restore}[what](step, folder / "state", ROWS, COLUMNS, enter)
        jax.distributed.shutdown()
    return part


def memory(pid: int) -> int:
    """Return the bytes of a process that no file backs; 0 if it has ended."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return sum(1024 * int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return 0


def child(what: str, n: int, folder: Path, i: int, phases: mmap.mmap) -> None:
    """Run in a forked process."""
    os.environ["JAX_PROCESS_ID"] = str(i)
    status = 1
    try:
        part = run(what, n, folder, lambda phase: phases.__setitem__(i, 1 + PHASES.index(phase)))
        (folder / f"part-{i}").write_text(str(part))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main(what: str, n: int, folder: Path) -> None:
    """Run `what`, "save" or "restore", in n forked processes."""
    phases, pids = mmap.mmap(-1, n), []
    for i in range(n):
        pids.append(os.fork())
        if not pids[-1]:
            child(what, n, folder, i, phases)
    peaks: list[dict[str, int]] = [{} for _ in pids]
    statuses: dict[int, int] = {}
    while len(statuses) < n:
        for i, pid in enumerate(pids):
            if i not in statuses and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG):
                statuses[i] = 1
            elif i not in statuses and phases[i]:
                name = PHASES[phases[i] - 1]
                # The first idle phase is the baseline.
                if not (name == IDLE and len(peaks[i]) > 1):
                    peaks[i][name] = max(peaks[i].get(name, 0), memory(pid))
        time.sleep(0.001)
    for i, found in enumerate(peaks):
        part = int((folder / f"part-{i}").read_text())
        print(json.dumps({"part": part, **{name: peak - found[IDLE] for name, peak in found.items() if name != IDLE}}))
