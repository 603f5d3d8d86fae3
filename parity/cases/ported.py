"""The case of a ported script: the files that were written for it, beside the recorded program in PyTorch.

PyTorch's side is the script's own modules, its optimizer's class and groups, and the learning rates with which its
updates were recorded. `jaxtrain.port.rerun` has computed the script's updates from these to the bit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.cost import flops
from jaxtrain.port.rerun import set_start
from jaxtrain.port.write import Ported
from jaxtrain.runner import frozen, optimizer_expression, recipe_optimizer
from jaxtrain.run import Recipe, load_recipe
from parity.case import Batch, Case
from parity.cases.recipe import moments_of
from parity.optimizer import Optimizer
from parity.sides.frozen import frozen_too, without_frozen


def ported_case(result: Ported, folder: Path, name: str) -> Case:
    """Return the case of the files in a folder.

    Args:
      result: The script that they were written for.
      folder: The folder, with `run.py`.
      name: Name in reports.

    Raises:
      UserError: A file cannot be read.
    """
    training, model = result.training, result.model
    recipe = shortened(load_recipe(f"{folder / 'run.py'}::Run")[1], training)
    task = recipe.task()
    is_frozen = frozen(recipe, task)
    shapes = task.shapes()
    expression = optimizer_expression(recipe)
    ours = recipe_optimizer(recipe, task.no_decay or (lambda path: False))
    windows = _windows(result)

    def batch(seed: int, rows: int) -> Batch:
        window = windows[seed % len(windows)]
        return {name: x[:rows] for name, x in window.items()}

    def torch_loss(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        return module(**batch), 1 / training.accumulate

    side = Optimizer(
        type(training.optimizer).__name__,
        partial(_optimizer, result),
        ours,
        moments_of(expression, ours, shapes.params),
        partial(_Recorded, result),
    )
    return Case(
        name=name,
        torch_model=partial(_module, result),
        torch_loss=torch_loss,
        loss_fn=without_frozen(task.loss_fn, is_frozen),
        params_like=shapes.params,
        names=model.names,
        batch=batch,
        rows=recipe.batch_size,
        optimizer=frozen_too(side, is_frozen),
        clip_norm=recipe.clip_norm,
        state_like=shapes.model_state,
        buffers=model.state_names,
        settings={"accumulate": recipe.accumulate, "steps": len(training.recording.updates)},
        precision=recipe.precision,
        module=result.module,
        is_large=flops(task.loss_fn, shapes.params, windows[0], jax.random.key(0), *_state(shapes)) > _LARGE,
    )


_LARGE = 10**8
"""FLOPs of a loss whose program is worth optimizing."""


def _state(shapes: Any) -> list[Any]:
    return [] if shapes.model_state is None else [shapes.model_state]


def shortened(recipe: Recipe, training: Any) -> Recipe:
    """Return a recipe whose schedule counts the epochs of the recording, which have fewer updates."""
    lengths = {u for u in _lengths(training)}
    if not training.is_by_epoch or not lengths:
        return recipe
    (length,) = lengths
    text = recipe.optimizer.replace(f"every={training.epoch}", f"every={length}")
    return dataclasses.replace(recipe, optimizer=text)


def _lengths(training: Any) -> list[int]:
    """Return the numbers of updates of the recorded epochs."""
    ends = [i for i, update in enumerate(training.recording.updates) if training.loader in update.passes]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _module(result: Ported) -> torch.nn.Module:
    set_start(result.training)
    return result.module


def _optimizer(result: Ported, named: Sequence[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the script's optimizer of a module's parameters."""
    names = {id(p): name for name, p in result.module.named_parameters()}
    by_name, first = dict(named), _settings(result)[0]
    groups = [
        {**settings, "params": [by_name[names[id(p)]] for p in group["params"]]}
        for group, settings in zip(result.training.optimizer.param_groups, first, strict=True)
    ]
    return type(result.training.optimizer)(groups)  # type: ignore[call-arg]


def _settings(result: Ported) -> list[list[dict[str, Any]]]:
    return [update.settings for update in result.training.recording.updates if update.optimizer is not None]


class _Recorded:
    """Gives an optimizer the settings of the recorded updates, one after another."""

    def __init__(self, result: Ported, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._settings, self._count = optimizer, _settings(result), 0

    def step(self) -> None:
        """Set those of the next update."""
        self._count += 1
        if self._count < len(self._settings):
            for group, settings in zip(self._optimizer.param_groups, self._settings[self._count], strict=True):
                group.update(settings)


def _windows(result: Ported) -> list[dict[str, np.ndarray]]:
    """Return the recorded windows of batches of the first shapes."""
    training, found = result.training, []
    first, inputs = training.programs[0]
    names = {leaf: name for name, leaf in inputs.leaves.items()}
    shapes = {name: first.tensors[value].shape for value, name in inputs.batch.items()}
    for update in training.recording.updates:
        window = [{names[leaf]: b.tensors[value] for value, leaf in b.leaves.items()} for b in update.backwards]
        if all({name: x.shape for name, x in micro.items()} == shapes for micro in window):
            found.append({name: np.concatenate([np.asarray(m[name]) for m in window]) for name in shapes})
    return found
