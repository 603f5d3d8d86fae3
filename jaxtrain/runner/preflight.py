"""What is checked, and told, before the first step."""

import math
from typing import Any

import jax
import numpy as np

from jaxtrain.batch_size import EffectiveBatch
from jaxtrain.errors import UserError
from jaxtrain.recipes import Recipe
from jaxtrain.tasks import Task

_AT_LEAST_ONE = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "save_every", "max_skips")
# A fresh model guesses about evenly; beyond this share of log(classes) its initialisation or its loss is suspect.
_SUSPECT = 0.25


def check_settings(recipe: Recipe) -> None:
    """Raises `UserError` for a setting no run can have."""
    for name in _AT_LEAST_ONE:
        if getattr(recipe, name) < 1:
            raise UserError(f"{name} {getattr(recipe, name)} is too small: make it 1 or more")
    if recipe.batch_size % recipe.accumulate:
        raise UserError(
            f"batch_size {recipe.batch_size} is not divisible by accumulate {recipe.accumulate}: "
            f"make it a multiple of {recipe.accumulate}"
        )
    if not 0 <= recipe.beta2 < 1:
        raise UserError(f"beta2 {recipe.beta2} is no share: choose 0 or more, below 1")
    for name, value in {"lr": recipe.lr, "clip_norm": recipe.clip_norm}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} {value} makes no training: make it positive")
    for name in ("warmup_steps", "weight_decay", "seed", "allow_recompile"):
        if getattr(recipe, name) < 0:
            raise UserError(f"{name} {getattr(recipe, name)} is negative: make it 0 or more")


def describe(task: Task, params: Any, batch: dict[str, np.ndarray], recipe: Recipe) -> dict[str, str]:
    """What a person would look at first: data, shapes, dtypes, label range, parameter count, effective batch."""
    leaves = jax.tree.leaves(params)
    count = sum(x.size for x in leaves)
    size = sum(x.size * x.dtype.itemsize for x in leaves)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    arrays = {name: f"{x.dtype} {list(x.shape)}, {x.min():g} to {x.max():g}" for name, x in batch.items()}
    effective = EffectiveBatch(recipe.batch_size // recipe.accumulate, recipe.accumulate)
    return {
        **task.facts,
        **arrays,
        "parameters": f"{count:,} in {dtypes}, {size / 2**20:.1f} MiB",
        "effective batch": str(effective).removeprefix("effective batch "),
    }


def check_labels_in_batch(task: Task, batch: dict[str, np.ndarray]) -> None:
    """Raises `UserError` for an integer array of the batch that is out of its bounds."""
    for name, x in batch.items():
        bound = task.bounds.get(name, task.classes)
        if np.issubdtype(x.dtype, np.integer) and not (x.min() >= 0 and x.max() < bound):
            raise UserError(f"{name} runs from {x.min()} to {x.max()}, outside 0..{bound - 1}: mend the data")


def judge_first_loss(loss: float, task: Task) -> dict[str, str]:
    """The first loss beside what it should be near and below. Raises `UserError` where it is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"the first loss is {loss}: look for inf or NaN in the data")
    even = math.log(task.classes)
    near = abs(loss - even) <= _SUSPECT * even
    advice = "" if near else " — far from it: look at initialisation, labels and loss"
    references = {name: f"{value:.3f} (to be beaten)" for name, value in task.references.items()}
    return {"first loss": f"{loss:.3f}; an even guess is log({task.classes}) = {even:.3f}{advice}", **references}
