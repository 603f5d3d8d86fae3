"""`jaxtrain replay DIR STEP`: rerun one step of a run and locate its first inf or NaN."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.loader import Batch
from jaxtrain.debug import NonfiniteTracer, NonfiniteValue, TracedValue
from jaxtrain.distributed import bypass_compilation_cache, data_parallel_size, parse_mesh, run_mesh
from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.flags import parse
from jaxtrain.observe import read_metrics
from jaxtrain.paths import path_name
from jaxtrain.run import Recipe, task_batches
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import (
    Checkpoints,
    Training,
    Unsaved,
    build_training,
    find_nonfinite_array,
    read_batch,
    read_recipe,
    saved_steps,
    state_shapes,
    training_step,
)
from jaxtrain.step import TrainState, leaf_name


@dataclass(frozen=True)
class Replay:
    """Rerun one step of a run, operation by operation, in float64 and in the run's precision."""


@dataclass(frozen=True)
class Interpreted:
    """The result of a step interpreted operation by operation.

    Attributes:
      loss: Value of the loss.
      stage: Stage of the first non-finite result: forward, backward or update; None if all results are finite.
      where: The non-finite gradient or array of the state.
      origin: The operations from the first non-finite value on.
    """

    loss: float
    stage: str | None
    where: str
    origin: list[NonfiniteValue]


def main(args: list[str]) -> int:
    """Parse, restore, rerun, print. Return 0 if all values are finite, else 1."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", "1", "--help"]
    if len(args) < 2 or args[0].startswith("-"):
        raise UserError("a run folder and a step are required: jaxtrain replay DIR STEP")
    if not args[1].isdecimal() or int(args[1]) < 1:
        raise UserError(f"STEP must be a positive integer, got {args[1]!r}: use a step of the run")
    parse(Replay(), args[2:], "jaxtrain replay DIR STEP")
    run, step = RunFolder(Path(args[0])), int(args[1])
    name, saved = read_recipe(run)
    recipe = _with_available_mesh(saved, jax.device_count())
    with bypass_compilation_cache(run_mesh(recipe.mesh)):
        training = build_training(recipe)
        if recipe.mesh != saved.mesh:  # which dropped the smaller last batches of a stream, as it would with `rows`
            loader = task_batches(training.task, recipe, np.arange(recipe.batch_size))
            training = dataclasses.replace(training, loader=loader)
        return _replay(run, name, training, step)


def _replay(run: RunFolder, name: str, training: Training, step: int) -> int:
    recipe = training.recipe
    state, batch, recorded = _before(run, training, step)
    print(escape_unprintable(f"{run.path} · {name} · step {step}"))
    new, metrics = training.step_of(batch)(jax.tree.map(jnp.copy, state), batch)
    loss = np.asarray(metrics["loss"])
    same = recorded is not None and _equal_bits(recorded.get("loss"), loss)
    bits = "" if recorded is None else f", {'' if same else 'not '}bit-identical to the run"
    print(f"loss          {float(loss):.7g} in {recipe.precision}{bits}")
    wide = _interpret(recipe, training, state, batch, wide=True)
    print(f"              {wide.loss:.7g} in float64")
    finite = (
        bool(jnp.isfinite(metrics["loss"])) and int(metrics["nonfinite_leaf"]) < 0 and not find_nonfinite_array(new)
    )
    if wide.stage is None and finite:
        print("all values are finite, and so is every operation in float64")
        return 0
    if wide.stage is not None:
        print("not finite in float64 either:" if not finite else "not finite in float64:")
        _print_origin(wide)
        return 1
    own = _interpret(recipe, training, state, batch, wide=False)
    if own.stage is None:
        print(f"finite in float64 and, operation by operation, in {recipe.precision}: only the compiled step overflows")
        return 1
    print(f"finite in float64: {recipe.precision} overflows")
    _print_origin(own)
    return 1


def _with_available_mesh(recipe: Recipe, available: int) -> Recipe:
    """Return `recipe` with its mesh if that many devices are available, else for one device.

    Raises `UserError` if one device would compute different numbers.
    """
    if recipe.mesh is None:
        return recipe
    shape = parse_mesh(recipe.mesh)
    needed = math.prod(shape.values())
    if needed == available:
        return recipe
    if getattr(recipe, "batch_norm", "sync") == "device" and data_parallel_size(shape) > 1:
        raise UserError(
            f"batch_norm 'device' needs the {needed} devices of mesh {recipe.mesh!r}, found {available}: use {needed} "
            f"devices, on CPUs with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    print(f"mesh {recipe.mesh} needs {needed} devices, found {available}: using one device, equal up to rounding")
    return dataclasses.replace(recipe, mesh=None)


def _before(run: RunFolder, training: Training, step: int) -> tuple[TrainState, Batch, dict[str, Any] | None]:
    """Return the state before a step, its batch, and its metrics if the run recorded them when it failed.

    The steps since the previous checkpoint, or since the start, are executed again, bit for bit as in the run.
    """
    recorded = read_batch(run.replay, step)
    lines = read_metrics(run.metrics)
    saved_at = saved_steps(run.checkpoints)
    last = max([*saved_at, *(line.step for line in lines), step if recorded else 0])
    if step > last:
        raise UserError(f"STEP must be at most {last}, the last step of {run.path}, got {step}: use an earlier step")
    loader = training.loader
    if any(s < step for s in saved_at):
        with Checkpoints(run.checkpoints, unsaved=Unsaved.of(training.task)) as checkpoints:
            state, saved = checkpoints.restore(training.shapes(), before=step)
        loader.restore(saved)
    elif run.torch.exists():
        raise UserError(f"{run.path} was imported and has no checkpoint before step {step}: use a later step")
    else:
        state = training.init()
    begin = int(state.step)
    print(f"starting at step {begin}: {step - 1 - begin} steps to rerun before step {step}")
    logged = [line.rollback for line in lines if line.rollback]
    rollbacks = [*logged, *([recorded.rollback] if recorded and recorded.rollback else [])]
    for i in range(begin, step):
        skipped = sum(rollback.batches_skipped for rollback in rollbacks if rollback.to_step == i)
        if skipped:
            position = loader.state()
            loader.restore({**position, "next_batch": position["next_batch"] + skipped})
        batch = next(loader)
        if i < step - 1:
            state, _ = training.step_of(batch)(state, batch)
    if recorded is None:
        return state, batch, None
    if any(not _equal_bits(batch[name], recorded.batch.get(name)) for name in batch):
        print("the data have changed since the run: using the recorded batch; the state may differ")
    return state, recorded.batch, recorded.metrics


def _interpret(recipe: Recipe, training: Training, state: TrainState, batch: Batch, *, wide: bool) -> Interpreted:
    """Interpret the step operation by operation, in float64 (`wide`) or in the run's precision.

    In float64 the program is that of fp32: without casts and without a loss scale.
    """
    recipe = dataclasses.replace(recipe, remat="none", unroll=False)
    if wide:
        recipe = dataclasses.replace(recipe, precision="fp32", fp8_exclude=None, loss_scale=None)
    step = training_step(recipe, training.task)
    like = state_shapes(step, training.task, recipe)
    state = jax.device_put(state, jax.devices()[0])
    numerics = {name: getattr(like, name) for name in ("loss_scale", "scales", "compensation")}
    before = state._replace(**numerics) if wide else state
    before = jax.tree.map(lambda x, shape: x if x.dtype == shape.dtype else x.astype(shape.dtype), before, like)
    arguments = {path_name(path): jnp.asarray(x) for path, x in _named(before, batch)}
    closed, shapes = jax.make_jaxpr(step.pure, return_shape=True)(before, batch)
    tracer = NonfiniteTracer(wide=wide)
    with jax.enable_x64(wide):
        outs = tracer.run(closed, arguments)
    new, metrics = jax.tree.unflatten(jax.tree.structure(shapes), outs)
    return _first_nonfinite(tracer, before, new, metrics)


def _named(state: TrainState, batch: Batch) -> list[tuple[Any, Any]]:
    """Return every argument of a step with its path, "state/params/…" or "batch/…"."""
    return [
        ((jax.tree_util.GetAttrKey(name), *path), x)
        for name, tree in (("state", state), ("batch", batch))
        for path, x in jax.tree.leaves_with_path(tree)
    ]


def _first_nonfinite(
    tracer: NonfiniteTracer, before: TrainState, new: TrainState, metrics: dict[str, TracedValue]
) -> Interpreted:
    loss, leaf = float(metrics["loss"].value), int(metrics["nonfinite_leaf"].value)
    gradient = ""
    if leaf >= 0:
        micro_batch = int(metrics["nonfinite_micro_batch"].value)
        gradient = f"the gradient of {leaf_name(before.params, leaf)}, micro-batch {micro_batch}"
    if not np.isfinite(loss):
        return Interpreted(loss, "forward", f"the loss, {gradient}".removesuffix(", "), tracer.origin(metrics["loss"]))
    if gradient:
        return Interpreted(loss, "backward", gradient, tracer.origin(metrics["grad_norm"]))
    parts = {name: getattr(new, name) for name in ("params", "model_state", "opt_state", "ema", "compensation")}
    for path, x in jax.tree.leaves_with_path(parts, is_leaf=lambda x: isinstance(x, TracedValue)):
        if x.value.ndim and x.sources:
            return Interpreted(loss, "update", path_name(path), tracer.origin(x))
    return Interpreted(loss, None, "", [])


def _print_origin(found: Interpreted) -> None:
    for place in found.origin:
        if place.operation is None:
            print(f"  input         {place.value}")
            continue
        print(f"  {'arises' if place.arose else 'becomes NaN':<13} {place.operation} -> {place.value}")
        print(f"                at {place.line}")
        for value in place.inputs:
            print(f"                from {value}")
    print(f"  {found.stage:<13} {found.where}")


def _equal_bits(a: Any, b: Any) -> bool:
    return a is not None and np.asarray(a).tobytes() == np.asarray(b).tobytes()
