"""The speed of a ported script: its recorded program in PyTorch beside the recipe, on the batches that were recorded.

Each engine is a process (`benchmarks.worker`). PyTorch's records the script anew, and trains its modules with its
optimizer by the recorded calls: what the script prints, evaluates or loads is not a part of a step. JAX's is the step
of the recipe, as `jaxtrain train` calls it. That both do the same work is proved before (`parity.ported`).
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.budget import Budget
from benchmarks.job import Job
from benchmarks.ported_engines import PREFIX, Work
from benchmarks.rows import NAMES
from benchmarks.timing import Timing, time_jobs
from jaxtrain.errors import RunFailed

ENGINES = ("torch_eager", "jax", "torch_compile")
"""In the order in which they are built: what compiles longest has what time is left."""
SHOWN = ("torch_eager", "torch_compile", "jax")
SECONDS, ROUNDS = 60.0, 10


def speed(result: Any, folder: Path, script: Path, args: Sequence[str]) -> str:
    """Return a line on the seconds of an update by each engine, timed in turns for up to a minute.

    Args:
      result: The `jaxtrain.port.ported.Ported` of the script.
      folder: The folder with the files that were written for it.
      script: The script.
      args: Its arguments.
    """
    from parity.ported import ported_case

    case = ported_case(result, folder, script.name.removesuffix(".py"))
    windows = case.windows if result.turns else case.windows[:1]  # turns follow each other as in the script
    with tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept:
        files = [str(Path(kept) / f"{i}.npz") for i in range(len(windows))]
        for file, window in zip(files, windows, strict=True):
            np.savez(file, allow_pickle=False, **window)
        updates = len(result.training.recording.updates)
        work = Work(str(script.resolve()), [*args], updates, str(folder.resolve()), files)
        path = Path(kept) / "work.json"
        path.write_text(json.dumps(asdict(work)), encoding="utf-8")
        return _line(path, case, can_compile=not result.turns, updates=len(windows))


def _line(path: Path, case: Any, *, can_compile: bool, updates: int) -> str:
    """Return the line of a file of work."""
    accumulate = case.settings["accumulate"]
    jobs = [Job(f"{PREFIX}{path}", engine, case.precision, accumulate) for engine in ENGINES]
    notes: list[str] = []
    timings: list[Timing] = []
    budget = Budget(SECONDS, remedy="")
    left_out = {} if can_compile else {"torch_compile": "several optimizers take turns"}
    while jobs := [job for job in jobs if job.engine not in left_out]:
        try:
            timings = time_jobs(jobs, ROUNDS, budget, notes.append)
            break
        except RunFailed as error:
            failed, _, reason = str(error).partition(" in ")
            left_out[failed.rpartition(" by ")[2]] = reason.partition(": ")[2]
            if budget.remaining() < 1:
                break
    for job in jobs:
        skipped = next((note for note in notes if f" by {job.engine} " in note), None)
        if skipped is not None and all(timing.job != job for timing in timings):
            left_out[job.engine] = skipped.rpartition(": ")[2]
    return line({timing.job.engine: timing.lower_decile_s / updates for timing in timings}, left_out)


def line(seconds: Mapping[str, float], left_out: Mapping[str, str]) -> str:
    """Return a line on the seconds of a step.

    Args:
      seconds: Of each engine that was timed.
      left_out: Why each of the others was not.

    Example:
      >>> line({"torch_eager": 0.0352, "torch_compile": 0.0306, "jax": 0.0221}, {})
      'PyTorch eager 35.2 ms, compiled 30.6 ms, JAX 22.1 ms a step, interleaved        1.38x'
      >>> line({"torch_eager": 0.03, "jax": 0.02}, {"torch_compile": "it was not ready in time"})
      'PyTorch eager 30 ms, JAX 20 ms a step, interleaved (no compiled: it was not ready in time)        1.5x'
    """
    names = {**NAMES, "torch_compile": "compiled" if "torch_eager" in seconds else NAMES["torch_compile"]}
    given = [f"{names[engine]} {1e3 * seconds[engine]:.3g} ms" for engine in SHOWN if engine in seconds]
    missing = [
        f"no {names[engine].removeprefix('PyTorch ')}: {left_out[engine]}" for engine in SHOWN if engine in left_out
    ]
    notes = f" ({'; '.join(missing)})" if missing else ""
    theirs = [seconds[engine] for engine in seconds if engine != "jax"]
    if "jax" not in seconds or not theirs:
        return f"not compared{notes}"
    return f"{', '.join(given)} a step, interleaved{notes}        {min(theirs) / seconds['jax']:.3g}x"
