"""Predicted and measured peak memory of training steps: `python -m tests.planning.measured_peak RECIPE SETTINGS …`.

SETTINGS is a JSON object. Prints {"predicted": bytes, "measured": bytes} for each pair. To be run in a process of its
own, whose MALLOC_MMAP_THRESHOLD_ has what is freed given back to the system.
"""

import ctypes
import dataclasses
import gc
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.memory import reset_peak, status_kib
from jaxtrain.cost.roofline import CPU
from jaxtrain.data.loader import Loader
from jaxtrain.planning.plan import compile_candidate
from jaxtrain.recipes import RECIPES
from jaxtrain.runner.optimizer import training_step
from jaxtrain.tasks import build


def main(name: str, settings: dict) -> None:
    recipe = dataclasses.replace(RECIPES[name], **settings)
    task = build(recipe)
    candidate = compile_candidate(recipe, task, CPU)
    batch = next(Loader(task.train, recipe.batch_size, recipe.seed))
    step = training_step(recipe, task.loss_fn)
    state = step.init(lambda: task.init()[0], model_state=lambda: task.init()[1], seed=recipe.seed)
    _, peak = above_rest(step, state, batch)
    held = candidate.state_bytes + sum(np.asarray(x).nbytes for x in batch.values())
    print(json.dumps({"predicted": candidate.peak_bytes, "measured": held + peak}), flush=True)


def above_rest(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> tuple[Any, float]:
    """The state after four steps, and the bytes that a step holds at its peak beside what is held before it."""
    peaks = []
    for _ in range(4):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        at_rest = status_kib("VmRSS")
        reset_peak()
        state, _ = jax.block_until_ready(step(state, batch))
        peaks.append((status_kib("VmHWM") - at_rest) * 1024)
    # The first step finds threads and code not there yet.
    return state, statistics.median(peaks[1:])


if __name__ == "__main__":
    for recipe_name, written in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(recipe_name, json.loads(written))
