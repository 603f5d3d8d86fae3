"""Export of a run to a PyTorch checkpoint: state dicts of model, optimizer, scheduler and scaler, and the step."""

from pathlib import Path

import jax
import numpy as np

from jaxtrain.errors import RunFailed
from jaxtrain.export.inference import named_weights
from jaxtrain.folder_files import open_file
from jaxtrain.interop import (
    CheckpointMetadata,
    NameTable,
    new_metadata,
    read_metadata,
    read_torch,
    to_torch,
    write_torch,
)
from jaxtrain.optim import decay_mask, no_decay
from jaxtrain.paths import path_name
from jaxtrain.run import Recipe, Task
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import loss_scale, optimizer_expression
from jaxtrain.step import TrainState, applied_updates, dynamic_loss_scale, is_scaled, refuse_complex, state_dict


def write_run(path: Path, run: RunFolder, recipe: Recipe, task: Task, names: NameTable, state: TrainState) -> None:
    """Write `state` as a PyTorch checkpoint, and verify its weights by reading it.

    Raises:
      RunFailed: The file holds different weights.
      UserError: A parameter is complex.
    """
    refuse_complex(state.params, "a checkpoint of PyTorch", "convert the parameters alone, by model.to_torch(params)")
    if run.torch.is_symlink() or run.torch.exists():
        open_file(run.torch).close()  # raises for a link
        metadata = read_metadata(run.torch)
    else:
        metadata = _metadata(recipe, task, names, state)
    write_torch(path, to_torch(state, metadata, optimizer_expression(recipe), names, task.buffers))
    exported = read_torch(path).model
    buffers = task.buffers or NameTable({})
    buffer_keys = {*buffers.torch_order(state.model_state)}
    read = named_weights(
        names.to_jax({name: x for name, x in exported.items() if name not in buffer_keys}, state.params),
        buffers.to_jax({name: exported[name] for name in buffer_keys}, state.model_state),
    )
    for name, weight in named_weights(state.params, state.model_state).items():
        if not np.array_equal(read[name], weight):
            raise RunFailed(f"{path} holds a different {name} than the run: not written")


def _metadata(recipe: Recipe, task: Task, names: NameTable, state: TrainState) -> CheckpointMetadata:
    initial = task.shapes()
    mask = decay_mask(task.no_decay or no_decay, initial.params)
    decays = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(mask)}
    scaled = is_scaled(state.loss_scale)
    return new_metadata(
        optimizer_expression(recipe),
        names,
        initial.params,
        buffer_names=task.buffers.torch_order(initial.model_state) if task.buffers else [],
        count=int(applied_updates(state)),
        lr=recipe.lr,
        scaler=state_dict(loss_scale(recipe) or dynamic_loss_scale(), state.loss_scale) if scaled else {},
        decays=decays.__getitem__,
    )
