"""The engines of a ported script, in the processes of `benchmarks.ported`."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.engines import Engine, torch_device, torch_engine
from benchmarks.job import Job

if TYPE_CHECKING:
    import torch

PREFIX = "port:"
"""Of the workload of a job; the name of a file follows."""


@dataclass(frozen=True)
class Work:
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


def engine(job: Job) -> Engine:
    """Return the engine of a job whose workload is a file of work."""
    work = Work(**json.loads(Path(job.workload.removeprefix(PREFIX)).read_text(encoding="utf-8")))
    found = _jax(work) if job.engine == "jax" else _torch(work, job)
    found.step()  # compiles it
    return found


def _jax(work: Work) -> Engine:
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


def _torch(work: Work, job: Job) -> Engine:
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
    case = ported_case(ported(understood(recording)), folder, script.name.removesuffix(".py"))
    model = case.torch_model().to(torch_device())
    sys.modules["__main__"] = _script_module(recording.modules.values())
    return torch_engine(case, model, case.torch_optimizer(model), work.batches(), job)


def _script_module(modules: Iterable["torch.nn.Module"]) -> ModuleType:
    """Return a module with the names that the modules of a script use: torch.compile looks for them in `__main__`."""
    kinds = {type(part) for module in modules for part in module.modules()}
    found = ModuleType("__main__")
    for kind in kinds:
        if kind.__module__ == "__main__":
            vars(found).update(kind.forward.__globals__)
    return found
