"""Predicted and measured peak memory of training steps on a mesh of virtual devices, summed over the devices.

Usage as `tests.planning.measured_peak`: `python -m tests.planning.measured_peak_on_mesh RECIPE SETTINGS …`.
"""

import dataclasses
import json
import sys
from typing import Any

import jax

from jaxtrain.cost.data_sheets import CPU
from jaxtrain.data.loader import Loader
from jaxtrain.distributed import shard
from jaxtrain.distributed.mesh import make_mesh, parse_mesh
from jaxtrain.planning.scaling import Scaling
from jaxtrain.recipes import RECIPES
from jaxtrain.runner.recipe_step import training_step
from tests.planning.measured_peak import peak_above_rest


def main(name: str, settings: dict) -> None:
    recipe = dataclasses.replace(RECIPES[name], **settings)
    task, shape = recipe.task(), parse_mesh(recipe.mesh)
    share = Scaling(recipe, jax.devices(), CPU).share(shape)
    devices = jax.devices()[: share.devices]
    step = shard(training_step(recipe, task), make_mesh(recipe.mesh, devices), task.sharding)
    state = step.init(lambda: task.initial().params, model_state=lambda: task.initial().model_state, seed=recipe.seed)
    batch = jax.block_until_ready(step.place(next(Loader(task.train, recipe.batch_size, recipe.seed))))
    state, peak = peak_above_rest(step.jitted, state, batch)
    measured = _total_bytes(state, batch) + peak
    print(json.dumps({"predicted": share.memory.peak * share.devices, "measured": measured}), flush=True)


def _total_bytes(state: Any, batch: Any) -> int:
    """Return the bytes of the state and the batch on all devices."""
    arrays = jax.tree.leaves((state._replace(rng=jax.random.key_data(state.rng)), batch))
    return sum(part.data.nbytes for x in arrays for part in x.addressable_shards)


if __name__ == "__main__":
    for recipe_name, settings_json in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(recipe_name, json.loads(settings_json))
