"""The speed of a ported script: its recorded program in PyTorch beside the recipe, on the batches that were recorded.

Each engine is a process (`benchmarks.worker`). PyTorch's records the script anew, and trains its modules with its
optimizer by the recorded calls: what the script prints, evaluates or loads is not a part of a step. JAX's is the step
of the recipe, as `jaxtrain train` calls it. That both do the same work is proved before (`parity.ported`).
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.budget import Budget
from benchmarks.engines import Engine, torch_device, torch_engine
from benchmarks.job import Job
from benchmarks.rows import NAMES
from benchmarks.timing import Timing, time_jobs
from jaxtrain.errors import RunFailed

PREFIX = "port:"
"""Of the workload of a job; the name of a file follows."""
ENGINES = ("torch_eager", "jax", "torch_compile")
"""In the order in which they are built: what compiles longest has what time is left."""
SHOWN = ("torch_eager", "torch_compile", "jax")
SECONDS, ROUNDS = 60.0, 10


@dataclass(frozen=True)
class _Work:
    """A ported script, as a file says it.

    Attributes:
      script: The script.
      args: Its arguments.
      updates: Number of updates that are recorded.
      folder: The folder with the files that were written for it.
      windows: Files of the batches of a step.
    """

    script: str
    args: Sequence[str]
    updates: int
    folder: str
    windows: Sequence[str]

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Return the batches of a step, each of an update."""
        return [dict(np.load(path)) for path in self.windows]


def speed(result: Any, folder: Path, script: Path, args: Sequence[str]) -> str:
    """Return a line on the seconds of an update by each engine, timed in turns for up to a minute.

    Args:
      result: The `jaxtrain.port.ported.Ported` of the script.
      folder: The folder with the files that were written for it.
      script: The script.
      args: Its arguments.
    """
    from parity.ported import ported_case

    case = ported_case(result, folder, script.stem)
    windows = case.windows if result.turns else case.windows[:1]  # turns follow each other as in the script
    with tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept:
        files = [str(Path(kept) / f"{i}.npz") for i in range(len(windows))]
        for file, window in zip(files, windows, strict=True):
            np.savez(file, allow_pickle=False, **window)
        updates = len(result.training.recording.updates)
        work = _Work(str(script.resolve()), [*args], updates, str(folder.resolve()), files)
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


def engine(job: Job) -> Engine:
    """Return the engine of a job whose workload is a file of work."""
    work = _Work(**json.loads(Path(job.workload.removeprefix(PREFIX)).read_text(encoding="utf-8")))
    found = _jax(work) if job.engine == "jax" else _torch(work, job)
    found.step()  # compiles it
    return found


def _jax(work: _Work) -> Engine:
    import jax

    from jaxtrain.run import load_recipe
    from jaxtrain.runner import build_training
    from parity.sides import jax_side

    recipe = load_recipe(f"{work.folder}/run.py::Run")[1]
    training = build_training(recipe)
    state, device = training.init(), jax.local_devices()[0]
    batches = [jax_side.arrays(batch, recipe.precision) for batch in work.batches()]
    losses: list[float] = []

    def run_step() -> None:
        nonlocal state
        for batch in batches:
            state, metrics = training.step_of(batch)(state, batch)
            jax.block_until_ready(state)
            losses.append(float(metrics["loss"]))

    return Engine(run_step, losses, device.device_kind, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use"))


def _torch(work: _Work, job: Job) -> Engine:
    from jaxtrain.port.data import keep_loaders
    from jaxtrain.port.kept_files import kept_files
    from jaxtrain.port.ported import ported
    from jaxtrain.port.script import record
    from jaxtrain.port.understand import understood
    from parity.ported import ported_case

    script, folder = Path(work.script), Path(work.folder)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept,
        kept_files(Path(kept)),
    ):
        recording = record(script, work.args, work.updates)
    keep_loaders(script, work.args, [found.loader for found in recording.loaders])
    case = ported_case(ported(understood(recording)), folder, script.stem)
    model = case.torch_model().to(torch_device())
    return torch_engine(case, model, case.torch_optimizer(model), work.batches(), job)
