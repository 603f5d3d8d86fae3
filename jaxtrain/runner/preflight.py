"""What is checked, and told, before the first step."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
import optax

from jaxtrain.distributed import resolved, sizes, ways
from jaxtrain.errors import UserError
from jaxtrain.fields import brief, type_errors
from jaxtrain.optim import OPTIMIZERS, Call, EffectiveBatch, build_expression
from jaxtrain.recipes import Recipe
from jaxtrain.run_folder import RunFolder, read_config
from jaxtrain.runner.optimizer import loss_scale, optimizer_expression, schedule, schedule_call
from jaxtrain.step import TrainState
from jaxtrain.tasks import Task
from jaxtrain.transforms import remat

_FROM_ZERO = {"warmup_steps", "seed", "allow_recompile", "keep_best"}
_OF_RUN = {field.name for field in dataclasses.fields(Recipe)}
# Steps are counted in int32. Larger sizes of a model than the others are mistakes, which would be traced or allocated.
_MOST_OF_RUN, _MOST_WIDE = 2**31 - 1, 2**20
_MOST_LAYERS = {"n_layer": 1000, "num_hidden_layers": 1000, "num_layers": 1000, "depth": 100}
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# As torch.optim and its schedulers check them.
_SHARES = {"b1", "b2"}
_PERIODS = {"step_size", "t_max", "t_0", "t_mult", "total_steps", "step_size_up", "step_size_down", "ns_steps"}
_NOT_NEGATIVE = _SHARES | {
    *("learning_rate", "lr", "max_lr", "base_lr", "eta_min", "final_lr", "min_lr"),
    *("momentum", "rho", "weight_decay", "eps", "alpha", "lr_decay", "momentum_decay", "initial_accumulator_value"),
    *("warmup_steps", "stable_steps", "decay_steps", "total_iters", "patience", "cooldown"),
}
# A fresh model guesses about evenly; beyond this share of log(classes) its initialisation or its loss is suspect.
_SUSPECT = 0.25


def read_recipe(run: RunFolder) -> tuple[str, Recipe]:
    """Read the name and the settings of a run, and validate them.

    Raises:
      UserError: The folder holds no run, or its settings are ones that no run can have.
    """
    if not run.config.exists():
        raise UserError(f"{run.path} holds no run: start one with jaxtrain train --out {run.path}")
    name, recipe = read_config(run.config)
    check_settings(recipe)
    return name, recipe


def check_settings(recipe: Recipe) -> None:
    """Raises `UserError` for a setting no run can have, before anything is read, allocated or compiled for it."""
    if wrong := type_errors(recipe):
        raise UserError(f"{wrong[0]}: mend it")
    for name, hint in get_type_hints(type(recipe)).items():
        value = getattr(recipe, name)
        if value is not None and int in (hint, *get_args(hint)):
            _check_number(name, value)
    if recipe.batch_size % recipe.accumulate:
        raise UserError(
            f"batch_size {recipe.batch_size} is not divisible by accumulate {recipe.accumulate}: "
            f"make it a multiple of {recipe.accumulate}"
        )
    if recipe.mesh is not None and (recipe.batch_size // recipe.accumulate) % (n := ways(sizes(recipe.mesh))):
        raise UserError(
            f"batch_size {recipe.batch_size} is not divisible by accumulate {recipe.accumulate} × the {n} devices of "
            f"mesh {recipe.mesh!r} that rows are divided over: make it a multiple of {n * recipe.accumulate}"
        )
    for name, what in {"beta2": "share", "dropout": "rate"}.items():
        if not 0 <= (value := getattr(recipe, name, 0)) < 1:
            raise UserError(f"{name} {value} is no {what}: choose 0 or more, below 1")
    if not 0 < (masked := getattr(recipe, "masked", 0.5)) < 1:
        raise UserError(f"masked {masked} is no share: choose a number between 0 and 1")
    for name in ("lr", "clip_norm"):
        if (value := getattr(recipe, name)) is not None and not _is_positive(value):
            raise UserError(f"{name} {value} makes no training: make it positive, in float32")
    if recipe.weight_decay < 0 or recipe.weight_decay > _LARGEST:
        raise UserError(f"weight_decay {recipe.weight_decay} is out of range: make it 0 or more, in float32")
    if recipe.spike_factor is not None and not 1 < recipe.spike_factor <= _LARGEST:
        raise UserError(f"spike_factor {recipe.spike_factor} makes spikes of sound losses: make it more than 1, 10 say")
    if not 0 <= recipe.stall_seconds <= threading.TIMEOUT_MAX:
        raise UserError(f"stall_seconds {recipe.stall_seconds} is no time: make it 0, for never, or more")
    remat(lambda: None, recipe.remat)
    _check_expressions(recipe)


def _check_number(name: str, value: int) -> None:
    least = 0 if name in _FROM_ZERO else 1
    most = _MOST_LAYERS.get(name, _MOST_OF_RUN if name in _OF_RUN else _MOST_WIDE)
    if value < least:
        raise UserError(f"{name} {value} is too small: make it {least} or more")
    if value > most:
        raise UserError(f"{name} {brief(value)} is too large: make it {most:,} or less")


def _is_positive(value: float) -> bool:
    """Whether it is so in float32, in which updates are made."""
    return _SMALLEST <= value <= _LARGEST


def _check_expressions(recipe: Recipe) -> None:
    """Each is put to use once, on a small matrix: what it needs and cannot have shows there."""
    with _naming("loss_scale", recipe.loss_scale):
        if (scale := loss_scale(recipe)) is not None:
            jax.eval_shape(scale.init, None)
    with _naming("schedule", recipe.schedule):
        _check_arguments(schedule_call(recipe))
        # A plateau is none of a step alone: the optimizer sees to it.
        if callable(rate := schedule(recipe)):
            jax.eval_shape(rate, jax.ShapeDtypeStruct((), np.int32))
    with _naming("optimizer", recipe.optimizer):
        whole = optimizer_expression(recipe)
        for member in [whole] if isinstance(whole, Call) else whole.values():
            _check_arguments(member)
            _check_update(build_expression(member, OPTIMIZERS, {}))


def _check_arguments(call: Any) -> None:
    """Raises `UserError` for a number in the call, or in a call in it, that is not finite or below what it can be."""
    if isinstance(call, list | tuple):
        for entry in call:
            _check_arguments(entry)
    if not isinstance(call, Call):
        return
    for name, value in call.arguments.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not -_LARGEST <= value <= _LARGEST:
                raise UserError(f"{name} {brief(value)} of {call.function} is no float32")
            if value < 0 and name in _NOT_NEGATIVE:
                raise UserError(f"{name} {value} of {call.function} is negative: make it 0 or more")
            if name in _SHARES and value >= 1:
                raise UserError(f"{name} {value} of {call.function} is no share: make it less than 1")
            if name in _PERIODS and (value < 1 or not isinstance(value, int)):
                raise UserError(f"{name} {value} of {call.function} is no number of steps: make it 1 or more")
        _check_arguments(value)


def _check_update(optimizer: optax.GradientTransformationExtraArgs) -> None:
    like = {"kernel": jax.ShapeDtypeStruct((2, 2), np.float32)}
    state = jax.eval_shape(optimizer.init, like)
    updates, _ = jax.eval_shape(optimizer.update, like, state, like)
    if jax.tree.map(lambda x: x.shape, updates) != jax.tree.map(lambda x: x.shape, like):
        raise UserError("its updates are of another shape than the parameters")


@contextlib.contextmanager
def _naming(setting: str, written: str | None) -> Iterator[None]:
    """Raises `UserError`, with the setting's name, for whatever goes wrong in making use of what is written."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{setting} {brief(written)}: {error}") from error
    except Exception as error:  # the functions it calls check few of their arguments
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{setting} {brief(written)} makes none ({why}): mend it") from error


def describe(task: Task, state: TrainState, batch: dict[str, np.ndarray], recipe: Recipe) -> dict[str, str]:
    """What a person would look at first: data, shapes, dtypes, label range, parameter count, mesh, effective batch."""
    leaves = jax.tree.leaves(state.params)
    count = sum(x.size for x in leaves)
    size = sum(x.size * x.dtype.itemsize for x in leaves)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    # Of several processes this one has some of the rows.
    shapes = {name: [recipe.batch_size, *x.shape[1:]] for name, x in batch.items()}
    arrays = {name: f"{x.dtype} {shapes[name]}, {x.min():g} to {x.max():g}" for name, x in batch.items()}
    mesh = resolved(recipe.mesh)
    effective = EffectiveBatch(recipe.batch_size // recipe.accumulate // ways(mesh), recipe.accumulate, ways(mesh))
    shared = {}
    if math.prod(mesh.values()) > 1:
        kept = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        shape = " × ".join(f"{axis} {n}" for axis, n in mesh.items())
        shared = {"mesh": f"{shape}; of parameters and optimizer state {kept / 2**20:.1f} MiB a device"}
    return {
        **task.facts,
        **arrays,
        "parameters": f"{count:,} in {dtypes}, {size / 2**20:.1f} MiB",
        **shared,
        "effective batch": str(effective).removeprefix("effective batch "),
    }


def check_labels_in_batch(task: Task, batch: dict[str, np.ndarray]) -> None:
    """Raises `UserError` for an integer array of the batch that is out of its bounds."""
    for name, x in batch.items():
        bound = task.bounds.get(name, task.classes)
        if np.issubdtype(x.dtype, np.integer) and not (x.min() >= 0 and x.max() < bound):
            raise UserError(f"{name} runs from {x.min()} to {x.max()}, outside 0..{bound - 1}: mend the data")


def check_first_loss(loss: float, task: Task) -> dict[str, str]:
    """The first loss beside what it should be near and below. Raises `UserError` where it is not finite."""
    if not math.isfinite(loss):
        raise UserError(f"the first loss is {loss}: look for inf or NaN in the data")
    even = math.log(task.classes)
    near = abs(loss - even) <= _SUSPECT * even
    advice = "" if near else " — far from it: look at initialisation, labels and loss"
    references = {name: f"{value:.3f} (to be beaten)" for name, value in task.references.items()}
    return {"first loss": f"{loss:.3f}; an even guess is log({task.classes}) = {even:.3f}{advice}", **references}
