"""Predicted and measured peak memory of training steps: `python -m tests.planning.measured_peak RECIPE SETTINGS …`.

SETTINGS is a JSON object. Prints {"predicted": bytes, "measured": bytes} for each pair. Run it in a separate process
with MALLOC_MMAP_THRESHOLD_ set, so that freed memory is returned to the system.
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
from jaxtrain.cost.data_sheets import CPU
from jaxtrain.data.loader import Loader
from jaxtrain.planning.search import compile_candidate
from jaxtrain.recipes import RECIPES
from jaxtrain.runner.recipe_step import training_step


def main(name: str, settings: dict) -> None:
    recipe = dataclasses.replace(RECIPES[name], **settings)
    task = recipe.task()
    candidate = compile_candidate(recipe, task, CPU)
    batch = next(Loader(task.train, recipe.batch_size, recipe.seed))
    step = training_step(recipe, task)
    state = step.init(lambda: task.initial().params, model_state=lambda: task.initial().model_state, seed=recipe.seed)
    _, peak = peak_above_rest(step, state, batch)
    held = candidate.state_bytes + sum(np.asarray(x).nbytes for x in batch.values())
    print(json.dumps({"predicted": candidate.peak_bytes, "measured": held + peak}), flush=True)


def peak_above_rest(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> tuple[Any, float]:
    """Return the state after four steps, and the peak bytes of a step above those held before it."""
    peaks = []
    for _ in range(4):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        at_rest = status_kib("VmRSS")
        reset_peak()
        state, _ = jax.block_until_ready(step(state, batch))
        peaks.append((status_kib("VmHWM") - at_rest) * 1024)
    # The first step also creates threads and loads code.
    return state, statistics.median(peaks[1:])


if __name__ == "__main__":
    for recipe_name, settings_json in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(recipe_name, json.loads(settings_json))
