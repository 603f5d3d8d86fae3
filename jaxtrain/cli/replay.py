"""`jaxtrain replay DIR STEP`: one step of a run again, and where its first inf or NaN arises."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.cli.arguments import parse
from jaxtrain.data.loader import Batch
from jaxtrain.debug import Place, Watch, Watched
from jaxtrain.distributed import bypass_compilation_cache, run_mesh, sizes, ways
from jaxtrain.errors import UserError
from jaxtrain.observe import read_metrics
from jaxtrain.paths import path_name
from jaxtrain.recipes import Recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import (
    Checkpoints,
    Training,
    build_training,
    find_nonfinite_array,
    read_batch,
    read_recipe,
    saved_steps,
    training_step,
)
from jaxtrain.step import TrainState, leaf_name


@dataclass(frozen=True)
class Replay:
    """Run a step of a run again, operation by operation, in float64 and in the run's own precision."""


@dataclass(frozen=True)
class Evaluated:
    """A step, operation by operation: its loss, and where it first is not finite.

    `stage`: forward, backward or update; None where all is finite. `where`: which gradient or array of the state.
    """

    loss: float
    stage: str | None
    where: str
    origin: list[Place]


def main(args: list[str]) -> int:
    """Parse, go there, evaluate, tell: 0 where all is finite, else 1."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", "1", "--help"]
    if len(args) < 2 or args[0].startswith("-"):
        raise UserError("which step? jaxtrain replay DIR STEP")
    if not args[1].isdecimal() or int(args[1]) < 1:
        raise UserError(f"step {args[1]!r} is none of a run's: give a number from 1")
    parse(Replay(), args[2:], "jaxtrain replay DIR STEP")
    run, step = RunFolder(Path(args[0])), int(args[1])
    name, saved = read_recipe(run)
    recipe = _on_its_mesh(saved, jax.device_count())
    with bypass_compilation_cache(run_mesh(recipe.mesh)):
        return _replay(run, name, recipe, step)


def _replay(run: RunFolder, name: str, recipe: Recipe, step: int) -> int:
    training, first = build_training(recipe)
    state, batch, then = _before(run, training, first, step)
    print(f"{run.path} · {name} · step {step}")
    new, metrics = training.step(jax.tree.map(jnp.copy, state), batch)
    loss = np.asarray(metrics["loss"])
    bits = "" if then is None else f", {'' if _same(then.get('loss'), loss) else 'not '}the same bits as then"
    print(f"loss          {float(loss):.7g} in {recipe.precision}{bits}")
    wide = _evaluated(recipe, training, state, batch, wide=True)
    print(f"              {wide.loss:.7g} in float64")
    sound = bool(jnp.isfinite(metrics["loss"])) and int(metrics["nonfinite_leaf"]) < 0 and not find_nonfinite_array(new)
    if wide.stage is None and sound:
        print("all is finite, in float64 every operation of it")
        return 0
    if wide.stage is not None:
        print("not finite in float64 either:" if not sound else "not finite in float64:")
        _tell(wide)
        return 1
    own = _evaluated(recipe, training, state, batch, wide=False)
    if own.stage is None:
        print(f"finite in float64, and in {recipe.precision} operation by operation: compiled, it overflows")
        return 1
    print(f"finite in float64: an overflow of {recipe.precision}")
    _tell(own)
    return 1


def _on_its_mesh(recipe: Recipe, here: int) -> Recipe:
    """`recipe` on the mesh that it says, where that is of the devices that are `here`, else on one device.

    Raises `UserError` where one device would give other numbers.
    """
    if recipe.mesh is None:
        return recipe
    shape = sizes(recipe.mesh)
    needed = math.prod(shape.values())
    if needed == here:
        return recipe
    if getattr(recipe, "batch_norm", "sync") == "device" and ways(shape) > 1:
        raise UserError(
            f"batch_norm 'device' is of the {needed} devices of mesh {recipe.mesh!r}, and here are {here}: replay it "
            f"on as many, on CPUs with XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    print(f"its mesh {recipe.mesh} is of {needed} devices, here are {here}: on one device, the same up to rounding")
    return dataclasses.replace(recipe, mesh=None)


def _before(
    run: RunFolder, training: Training, first: TrainState, step: int
) -> tuple[TrainState, Batch, dict[str, Any] | None]:
    """The state before a step, its batch, and its metrics where it ended the run.

    From the checkpoint before it, or from the start, the run's own steps are taken again: to the same bits.
    """
    kept = read_batch(run.replay, step)
    lines = read_metrics(run.metrics)
    saved_at = saved_steps(run.checkpoints)
    furthest = max([*saved_at, *(line["step"] for line in lines), step if kept else 0])
    if step > furthest:
        raise UserError(f"{run.path} is at step {furthest}: choose a step up to that, not {step}")
    state, loader = first, training.loader
    if any(s < step for s in saved_at):
        with Checkpoints(run.checkpoints) as checkpoints:
            state, saved = checkpoints.restore(first, before=step)
        loader.restore(saved)
    elif run.torch.exists():
        raise UserError(f"{run.path} was imported and has no checkpoint before step {step}: choose a later one")
    begin = int(state.step)
    print(f"from step {begin}: {step - 1 - begin} steps before this one are taken again")
    jumps = [line for line in lines if "batches_skipped" in line] + ([kept[2]] if kept and kept[2] else [])
    for i in range(begin, step):
        skipped = sum(int(jump["batches_skipped"]) for jump in jumps if jump["rolled_back_to"] == i)
        if skipped:
            position = loader.state()
            loader.restore({**position, "next_batch": position["next_batch"] + skipped})
        batch = next(loader)
        if i < step - 1:
            state, _ = training.step(state, batch)
    if kept is None:
        return state, batch, None
    if any(not _same(batch[name], kept[0].get(name)) for name in batch):
        print("the data are not what they were: the batch is the one of then, the state may not be")
    return state, kept[0], kept[1]


def _evaluated(recipe: Recipe, training: Training, state: TrainState, batch: Batch, *, wide: bool) -> Evaluated:
    """The step evaluated operation by operation, in float64 or in the run's own precision.

    For float64 it is the program of fp32: without casts and without a loss scale.
    """
    recipe = dataclasses.replace(recipe, remat="none", unroll=False)
    if wide:
        recipe = dataclasses.replace(recipe, precision="fp32", loss_scale=None)
    step = training_step(recipe, training.task.loss_fn)
    like = jax.eval_shape(lambda: step.init(training.task.params, model_state=training.task.model_state))
    state = jax.device_put(state, jax.devices()[0])
    before = state._replace(loss_scale=like.loss_scale) if wide else state
    before = jax.tree.map(lambda x, shape: x if x.dtype == shape.dtype else x.astype(shape.dtype), before, like)
    arguments = {path_name(path): jnp.asarray(x) for path, x in _named(before, batch)}
    closed, shapes = jax.make_jaxpr(step.pure, return_shape=True)(before, batch)
    watch = Watch(wide=wide)
    with jax.enable_x64(wide):
        outs = watch.run(closed, arguments)
    new, metrics = jax.tree.unflatten(jax.tree.structure(shapes), outs)
    return _judged(watch, before, new, metrics)


def _named(state: TrainState, batch: Batch) -> list[tuple[Any, Any]]:
    """Every argument of a step and its path, "state/params/…" or "batch/…"."""
    return [
        ((jax.tree_util.GetAttrKey(name), *path), x)
        for name, tree in (("state", state), ("batch", batch))
        for path, x in jax.tree.leaves_with_path(tree)
    ]


def _judged(watch: Watch, before: TrainState, new: TrainState, metrics: dict[str, Watched]) -> Evaluated:
    loss, leaf = float(metrics["loss"].value), int(metrics["nonfinite_leaf"].value)
    gradient = ""
    if leaf >= 0:
        micro_batch = int(metrics["nonfinite_micro_batch"].value)
        gradient = f"the gradient of {leaf_name(before.params, leaf)}, micro-batch {micro_batch}"
    if not np.isfinite(loss):
        return Evaluated(loss, "forward", f"the loss, {gradient}".removesuffix(", "), watch.origin(metrics["loss"]))
    if gradient:
        return Evaluated(loss, "backward", gradient, watch.origin(metrics["grad_norm"]))
    parts = {name: getattr(new, name) for name in ("params", "model_state", "opt_state", "ema")}
    for path, x in jax.tree.leaves_with_path(parts, is_leaf=lambda x: isinstance(x, Watched)):
        if x.value.ndim and x.sources:
            return Evaluated(loss, "update", path_name(path), watch.origin(x))
    return Evaluated(loss, None, "", [])


def _tell(found: Evaluated) -> None:
    for place in found.origin:
        if place.operation is None:
            print(f"  given         {place.value}")
            continue
        print(f"  {'arises' if place.arose else 'becomes NaN':<13} {place.operation} -> {place.value}")
        print(f"                at {place.line}")
        for given in place.inputs:
            print(f"                of {given}")
    print(f"  {found.stage:<13} {found.where}")


def _same(then: Any, now: Any) -> bool:
    return then is not None and np.asarray(then).tobytes() == np.asarray(now).tobytes()
