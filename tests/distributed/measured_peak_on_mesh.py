"""What a training step holds at its peak on a mesh of virtual devices, all of them together, beside what is predicted:
`python -m tests.distributed.measured_peak_on_mesh RECIPE SETTINGS …`, as `tests.measured_peak`."""

import ctypes
import dataclasses
import gc
import json
import statistics
import sys
from typing import Any

import jax

from benchmarks.memory import CLEAR, _kilobytes
from jaxtrain.data.loader import Loader
from jaxtrain.distributed import shard
from jaxtrain.distributed.mesh import make_mesh, sizes
from jaxtrain.recipes import RECIPES
from jaxtrain.roofline import CPU
from jaxtrain.runner.optimizer import training_step
from jaxtrain.scaling import Scaling
from jaxtrain.tasks import build


def main(name: str, settings: dict) -> None:
    recipe = dataclasses.replace(RECIPES[name], **settings)
    task, shape = build(recipe), sizes(recipe.mesh)
    share = Scaling(recipe, jax.devices(), CPU).share(shape)
    devices = jax.devices()[: share.devices]
    step = shard(training_step(recipe, task.loss_fn), make_mesh(recipe.mesh, devices), task.sharding)
    state = step.init(lambda: task.init()[0], model_state=lambda: task.init()[1], seed=recipe.seed)
    batch = jax.block_until_ready(step.place(next(Loader(task.train, recipe.batch_size, recipe.seed))))
    peaks = []
    for _ in range(4):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        at_rest = _kilobytes("VmRSS")
        CLEAR.write_text("5")  # man 5 proc: the peak starts again from what is held now
        state, _ = jax.block_until_ready(step.jitted(state, batch))
        peaks.append((_kilobytes("VmHWM") - at_rest) * 1024)
    # The first step finds threads and code not there yet.
    measured = _held(state, batch) + statistics.median(peaks[1:])
    print(json.dumps({"predicted": share.memory.peak * share.devices, "measured": measured}), flush=True)


def _held(state: Any, batch: Any) -> int:
    """Bytes on all devices."""
    arrays = jax.tree.leaves((state._replace(rng=jax.random.key_data(state.rng)), batch))
    return sum(part.data.nbytes for x in arrays for part in x.addressable_shards)


if __name__ == "__main__":
    for recipe_name, written in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(recipe_name, json.loads(written))
