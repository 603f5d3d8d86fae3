"""Checks before the first step, and the facts printed about a run."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.cost import format_bytes
from jaxtrain.debug import TESTED_JAX, miscompiled_once
from jaxtrain.distributed import PIPELINE, data_parallel_size, parse_mesh, run_devices, run_mesh_sizes
from jaxtrain.errors import UserError
from jaxtrain.fields import LARGEST, brief, field_errors
from jaxtrain.labs.pipeline import Schedule
from jaxtrain.optim import OPTIMIZERS, Call, EffectiveBatch, build_expression
from jaxtrain.passes import format_uses, kernel_uses, remat
from jaxtrain.paths import Matching, path_name
from jaxtrain.run import Recipe, Task, is_reference, run_policy
from jaxtrain.run_folder import RunFolder, default_folder, read_config
from jaxtrain.runner.loss_scales import loss_scale
from jaxtrain.runner.recipe_step import defines_optimizer, frozen, optimizer_expression, schedule, schedule_call
from jaxtrain.step import CompilerOptions, TrainState, validated

# An untrained model predicts almost uniformly; a first loss this far from log(classes), relative to it, is suspect.
_SUSPECT = 0.25


def read_recipe(run: RunFolder) -> tuple[str, Recipe]:
    """Read the name and settings of a run and check them.

    Args:
      run: The folder of the run.

    Returns:
      A tuple (name of the recipe, the recipe with the run's settings).

    Raises:
      UserError: The folder holds no run, or its settings are invalid.
    """
    name, recipe = stored_recipe(run)
    check_settings(recipe)
    return name, recipe


def stored_recipe(run: RunFolder, named: str | None = None) -> tuple[str, Recipe]:
    """Read the name and settings of a run without checking them, for a caller that changes and then checks them.

    Args:
      run: The folder of the run.
      named: FILE.py::NAME that replaces the recorded reference, as in `read_config`.

    Raises:
      UserError: The folder holds no run.
    """
    if not run.config.exists():
        if is_reference(run.path.name):
            example = default_folder(str(run.path)).path
            raise UserError(f"{run.path} is a recipe, not the folder of a run: give one, such as {example}")
        start = f"jaxtrain train {named or 'RECIPE'} --out {run.path}"
        raise UserError(f"{run.path} holds no run: start one with {start}")
    return read_config(run.config, named)


def check_compiler() -> None:
    """Raise `UserError` if this JAX computes programs wrongly on the device that it trains on."""
    device = jax.local_devices()[0]
    if wrong := miscompiled_once(device):
        raise UserError(
            f"jax {jax.__version__} computes wrong numbers on this {device.device_kind} ({', '.join(wrong)}): install "
            f"the one that jaxtrain is tested with, pip install jax=={TESTED_JAX}"
        )


def check_settings(recipe: Recipe) -> None:
    """Check the settings of a run before anything is read, allocated or compiled.

    Args:
      recipe: The settings.

    Raises:
      UserError: A setting is invalid; the message says what is allowed.
    """
    if wrong := field_errors(recipe):
        raise UserError(wrong[0])
    if recipe.batch_size % recipe.accumulate:
        raise UserError(
            f"batch_size {recipe.batch_size} is not divisible by accumulate {recipe.accumulate}: "
            f"use a multiple of {recipe.accumulate}"
        )
    run_policy(recipe)
    if recipe.watch_precision and recipe.precision in ("fp32", "tf32", "fp8_delayed"):
        raise UserError(
            f"watch_precision {recipe.watch_precision} measures what 16 or 8 bits lose, which is not supported for "
            f"precision {recipe.precision!r}: use another precision, such as fp16, or 0"
        )
    if recipe.mesh is not None and (recipe.batch_size // recipe.accumulate) % (
        n := data_parallel_size(parse_mesh(recipe.mesh))
    ):
        raise UserError(
            f"batch_size {recipe.batch_size} is not divisible by accumulate {recipe.accumulate} × the {n} devices of "
            f"mesh {recipe.mesh!r} that rows are sharded over: use a multiple of {n * recipe.accumulate}"
        )
    remat(lambda: None, recipe.remat)
    _check_expressions(recipe)


def _check_expressions(recipe: Recipe) -> None:
    """Check loss scale, schedule and optimizer by applying each of them once, to a small matrix."""
    with _naming("loss_scale", recipe.loss_scale):
        if (scale := loss_scale(recipe)) is not None:
            jax.eval_shape(scale.init, None)
    with _naming("schedule", recipe.schedule):
        _check_arguments(schedule_call(recipe))
        # A plateau schedule is not a function of the step: the optimizer applies it.
        if callable(rate := schedule(recipe)):
            jax.eval_shape(rate, jax.ShapeDtypeStruct((), np.int32))
    if defines_optimizer(recipe):
        return
    with _naming("optimizer", recipe.optimizer):
        groups = optimizer_expression(recipe)
        for member in [groups] if isinstance(groups, Call) else groups.values():
            _check_arguments(member)
            _check_update(build_expression(member, OPTIMIZERS, {}))


def _check_arguments(call: Any) -> None:
    """Raise `UserError` for a number in a call, or nested in it, that float32 does not represent."""
    if isinstance(call, list | tuple):
        for entry in call:
            _check_arguments(entry)
    if not isinstance(call, Call):
        return
    for name, value in call.arguments.items():
        if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
            raise UserError(f"{name} of {call.function} must be representable in float32, got {brief(value)}")
        _check_arguments(value)


def _check_update(optimizer: optax.GradientTransformationExtraArgs) -> None:
    like = {"kernel": jax.ShapeDtypeStruct((2, 2), np.float32)}
    state = jax.eval_shape(optimizer.init, like)
    update = partial(optimizer.update, metrics=_AnyMetric())
    updates, _ = jax.eval_shape(update, like, state, like)
    if jax.tree.map(lambda x: x.shape, updates) != jax.tree.map(lambda x: x.shape, like):
        raise UserError("the optimizer returned updates whose shapes differ from the parameters'")


class _AnyMetric(dict[str, Any]):
    """Metrics of a loss function that is not known yet."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> np.ndarray:
        return np.zeros((), np.float32)


@contextlib.contextmanager
def _naming(setting: str, value: str | None) -> Iterator[None]:
    """Turn any error of applying a setting into a `UserError` that names it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{setting} {brief(value)}: {error}") from error
    except Exception as error:  # few of the called functions check their arguments
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{setting} {brief(value)}: no {setting.replace('_', ' ')} could be built ({why})") from error


def describe(
    task: Task, state: TrainState, batch: dict[str, np.ndarray], recipe: Recipe, options: CompilerOptions | None
) -> dict[str, str]:
    """Return the facts printed before the first step: data, shapes, ranges, parameters, mesh, effective batch.

    On several GPUs, also XLA's options of the step.
    """
    leaves = jax.tree.leaves(state.params)
    count = sum(x.size for x in leaves)
    size = sum(x.size * x.dtype.itemsize for x in leaves)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    # With several processes this one has some of the rows.
    shapes = {name: [recipe.batch_size, *x.shape[1:]] for name, x in batch.items()}
    arrays = {name: f"{x.dtype} {shapes[name]}, {x.min():g} to {x.max():g}" for name, x in batch.items()}
    mesh = run_mesh_sizes(recipe.mesh)
    effective = EffectiveBatch(
        recipe.batch_size // recipe.accumulate // data_parallel_size(mesh), recipe.accumulate, data_parallel_size(mesh)
    )
    is_frozen = frozen(recipe, task)
    held = sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(state.params) if is_frozen(path_name(path)))
    average = {} if recipe.ema is None else {"evaluated": f"moving average of the parameters, decay {recipe.ema:g}"}
    sharding = {}
    if math.prod(mesh.values()) > 1:
        local = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
        shape = " × ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1)
        facts = [shape, f"{local / 2**20:.1f} MiB of parameters and optimizer state per device"]
        if (stages := mesh[PIPELINE]) > 1:
            schedule = Schedule(stages, recipe.pipeline_chunks, recipe.accumulate)
            facts.append(f"{schedule.bubble:.0%} of the time is the pipeline's bubble")
        sharding = {"mesh": "; ".join(facts)}
        if options and run_devices(recipe.mesh)[0].platform == "gpu":
            sharding["compiler options"] = _format_options(options)
    return {
        **task.description,
        **arrays,
        "parameters": f"{count:,} in {dtypes}, {size / 2**20:.1f} MiB" + (f", {held:,} frozen" if held else ""),
        **average,
        **fp8_products(task, state, batch, recipe),
        **sharding,
        "effective batch": str(effective).removeprefix("effective batch "),
    }


def fp8_products(task: Task, state: TrainState, batch: dict[str, Any], recipe: Recipe) -> dict[str, str]:
    """Return which kernels are in 8 bits, as a fact with its name; nothing if the precision has none.

    Args:
      task: The task.
      state: The state, or its shapes.
      batch: A batch, or its shapes.
      recipe: The settings.

    Raises:
      UserError: A pattern of excluded kernels matches none.
    """
    numerics = run_policy(recipe)
    if numerics.fp8 is None:
        return {}
    in_compute_dtype = dataclasses.replace(numerics, fp8=None).apply(validated(task.loss_fn), state_argnums=(3,))
    uses = kernel_uses(in_compute_dtype, numerics.fp8, state.params, batch, state.rng, state.model_state)
    for pattern in numerics.fp8.exclude if recipe.fp8_exclude is not None else ():
        if not any(Matching((pattern,))(use.path) for use in uses):
            kernels = ", ".join(dict.fromkeys(use.path for use in uses))
            raise UserError(f"fp8_exclude {pattern!r} matches no kernel: use a pattern of one of {kernels}")
    return {"fp8": format_uses(uses)}


def _format_options(options: CompilerOptions) -> str:
    values = ", ".join(f"{name.removeprefix('xla_gpu_')}={str(value).lower()}" for name, value in options.items())
    return f"xla_gpu_{{{values}}}"


def check_disk(folder: Path, state: TrainState, kept: int) -> str | None:
    """Compare a checkpoint's size with the free space of the disk that holds a new run.

    Args:
      folder: The folder of the run, which may not exist yet.
      state: What a checkpoint holds, or its shapes.
      kept: Number of checkpoints on the disk at once.

    Returns:
      A warning if the disk may become full; None if it does not.

    Raises:
      UserError: It cannot hold one checkpoint.
    """
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(
            f"a checkpoint takes {format_bytes(size)}, but the disk of {place} has only {format_bytes(free)} free: "
            "make room, or choose another --out"
        )
    if free < kept * size:
        return (
            f"warning: {kept} checkpoints of {format_bytes(size)} are kept at once, but the disk of {place} has only "
            f"{format_bytes(free)} free: make room, or lower --keep-last"
        )
    return None


def check_labels_in_batch(task: Task, batch: dict[str, np.ndarray]) -> None:
    """Raise `UserError` for an integer array of a batch with values out of range."""
    for name, x in batch.items():
        if (bound := _bound(task, name, x)) is not None and not _is_below(x, bound):
            raise UserError(f"{name} must be in 0..{bound - 1}, got {x.min()} to {x.max()}: fix the data")


def suspects(task: Task, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that may make its loss NaN: all but integers known to be in range."""

    def is_right(name: str, x: np.ndarray) -> bool:
        bound = _bound(task, name, x)
        return bound is not None and _is_below(x, bound)

    return {name: x for name, x in batch.items() if not is_right(name, x)}


def _bound(task: Task, name: str, x: np.ndarray) -> int | None:
    """Return the exclusive upper bound of an integer array of a batch; None if the task gives none."""
    return task.bounds.get(name, task.classes) if np.issubdtype(x.dtype, np.integer) else None


def _is_below(x: np.ndarray, bound: int) -> bool:
    return bool(x.min() >= 0 and x.max() < bound)


def check_first_loss(loss: float, task: Task, cause: str | None = None) -> dict[str, str]:
    """Compare the first validation loss to that of a uniform prediction.

    Raises `UserError` if it is not finite; `cause` is what `cause_in_batch` found.
    """
    if not math.isfinite(loss) and cause:
        raise UserError(f"the first validation loss is {loss}, {cause}")
    if not math.isfinite(loss):
        raise UserError(
            f"the first validation loss is {loss}: check the data, the initial parameters and the loss for inf or NaN"
        )
    references = {name: f"{value:.3f} (to be beaten)" for name, value in task.references.items()}
    if task.classes is None:
        return {"first loss": f"{loss:.3f}", **references}
    uniform = math.log(task.classes)
    is_near = abs(loss - uniform) <= _SUSPECT * uniform
    advice = "" if is_near else ", which is far from it: check initialization, labels and loss"
    return {"first loss": f"{loss:.3f}; a uniform guess is log({task.classes}) = {uniform:.3f}{advice}", **references}
