"""Build the parts of a run from its recipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxtrain.cost import flops
from jaxtrain.data import Batch
from jaxtrain.data.batches import TrainingBatches, shorter_rows
from jaxtrain.distributed import (
    constrain_shardings,
    local_rows,
    place_whole_batch,
    run_devices,
    run_mesh,
    shard,
)
from jaxtrain.errors import UserError
from jaxtrain.observe import Gauges
from jaxtrain.run import (
    EvaluationSums,
    Initial,
    Media,
    Recipe,
    Task,
    check_memory,
    evaluation_batches,
    means,
    run_policy,
    split_media,
    task_batches,
)
from jaxtrain.runner.fetched_batches import FetchedBatch
from jaxtrain.runner.preflight import suspects
from jaxtrain.runner.recipe_step import frozen, state_shapes, training_step
from jaxtrain.runner.transfer import Place
from jaxtrain.step import TrainState, TrainStep, averaged, cause_in_batch, eval_step, failed_assumption, validated


class Evaluation(NamedTuple):
    """What an evaluation returns."""

    metrics: dict[str, float]
    """Means of loss and metrics over the validation rows; nothing without validation data."""
    media: Media
    """What the task's own `evaluate` returned besides."""
    cause: str | None = None
    """What a batch holds that makes the loss inf or NaN."""


Evaluate = Callable[[TrainState], Evaluation]


@dataclass(frozen=True)
class Training:
    """The parts of a run besides its state. Of these only the loader's position is saved."""

    recipe: Recipe
    task: Task
    loader: TrainingBatches
    step: TrainStep
    shorter_step: TrainStep
    """The same step for the smaller last batch of an epoch, compiled for each number of rows."""
    evaluate: Evaluate
    """Evaluates a state, with `ema` by the moving average of its parameters."""
    place: Place | None = None
    """Places a batch on the devices ahead of its step; None on a CPU, where there is nothing to transfer."""

    def init(self) -> TrainState:
        """Create the initial state: besides it, nothing stays on the devices. On a mesh it is created in shards."""
        task, seed = self.task, self.recipe.seed
        if task.load is not None:
            like = self.shapes()
            initial = task.initial(Initial(like.params, like.model_state))
            return self.step.init(initial.params, model_state=initial.model_state, seed=seed, donate=True)
        if run_mesh(self.recipe.mesh) is None:
            initial = task.initial()
            return self.step.init(initial.params, model_state=initial.model_state, seed=seed)
        # Each function creates the shards of its own result, never all of it on one device.
        return self.step.init(lambda: task.initial().params, model_state=lambda: task.initial().model_state, seed=seed)

    def dispatch(self, state: TrainState, batch: FetchedBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Dispatch a step, on the batch's copy on the devices if it has one."""
        step = self.step_of(batch.arrays)
        if batch.device is None:
            return step(state, batch.arrays)
        return step.placed(state, batch.device)

    def step_of(self, batch: Batch) -> TrainStep:
        """Return the step for a batch, by its number of rows."""
        rows = len(next(iter(batch.values())))
        return self.step if rows == len(self.loader.rows) else self.shorter_step

    def shapes(self) -> TrainState:
        """Return the shapes of the state, on a mesh with their shardings: nothing is allocated."""
        return state_shapes(self.step, self.task, self.recipe)


def build_training(recipe: Recipe, message: Callable[[str], None] = lambda text: None) -> Training:
    """Build the parts of a run; its state is created by their `init`, or restored into their `shapes`.

    Args:
      recipe: The settings of the run.
      message: Prints one line.

    Raises:
      UserError: The recipe's data or model cannot be built.
    """
    mesh, task = run_mesh(recipe.mesh), recipe.task()
    _check_task(task, recipe)
    _check_shorter_batch(recipe, task)
    step = training_step(recipe, task)
    by_rows = replace(recipe, allow_recompile=recipe.allow_recompile + recipe.batch_size)
    shorter_step = training_step(by_rows, task)
    rows = None
    if mesh is None:
        check_memory(task.create, frozen=frozen(recipe, task))
    else:
        check_memory(
            task.create, mesh.shape["fsdp"] * mesh.shape["expert"] * mesh.shape["tensor"], frozen(recipe, task)
        )
        step = shard(step, mesh, task.sharding)
        rows = local_rows(mesh, recipe.batch_size, recipe.accumulate)
    loader = task_batches(task, recipe, rows, message)
    place = step.place if _has_own_memory(run_devices(recipe.mesh)) else None
    return Training(recipe, task, loader, step, shorter_step, held_out_evaluation(task, recipe, loader.peek), place)


def _has_own_memory(devices: Sequence[jax.Device]) -> bool:
    return any(device.platform != "cpu" for device in devices)


def _check_task(task: Any, recipe: Recipe) -> None:
    """Raise `UserError` for what is no task, and for settings that need an evaluation of one without any."""
    if not isinstance(task, Task):
        raise UserError(
            f"{type(recipe).__name__}.task returned {type(task).__name__}: "
            "return jaxtrain.Task(init=…, loss_fn=…, train=…)"
        )
    if task.validation is None and task.evaluate is None:
        needs = {"patience": (recipe.patience, None), "best_metric": (task.best_metric, "loss")}
        for name, (value, default) in needs.items():
            if value != default:
                raise UserError(f"{name} {value!r} needs an evaluation: give Task.validation or Task.evaluate")


def _check_shorter_batch(recipe: Recipe, task: Task) -> None:
    """Raise `UserError` for a DataLoader whose smaller last batch cannot be divided into micro-batches."""
    shorter = shorter_rows(task.train, recipe.batch_size)
    if shorter and shorter % recipe.accumulate:
        raise UserError(
            f"the last batch of the DataLoader has {shorter} rows, which accumulate {recipe.accumulate} does not "
            "divide: give it drop_last=True"
        )


def build_gauges(training: Training, state: TrainState, batch: Any) -> Gauges:
    """Build the gauges of the run's devices, given its state or the shapes of it.

    FLOPs are counted for this process's rows and scaled to the batch.
    """
    shapes = jax.eval_shape(lambda *args: args, state.params, batch, state.rng, state.model_state)

    def model_flops() -> int:
        # The backward pass takes two products for each one of the forward pass.
        processes = training.recipe.batch_size // len(next(iter(batch.values())))
        return 3 * flops(validated(training.task.loss_fn), *shapes) * processes

    return Gauges(model_flops, run_devices(training.recipe.mesh), training.recipe.precision)


def _check_names(batch: Mapping[str, Any], of_training: Mapping[str, Any], error: Exception) -> None:
    """Raise `UserError` if a batch of an evaluation, which raised an error, lacks an array of one of training."""
    if missing := [name for name in of_training if name not in batch]:
        given = ", ".join(name for name in batch if name != "weight")  # which an evaluation adds
        raise UserError(
            f"the validation data have no {missing[0]!r}, which the training data have, only {given}: give both the "
            "same names"
        ) from error


def held_out_evaluation(task: Task, recipe: Recipe, peek: Callable[[], Mapping[str, Any]] | None = None) -> Evaluate:
    """Return the evaluation of a run: a function of a state, which is evaluated by its moving average if it has one.

    Args:
      task: The task of the run.
      recipe: The settings of the run.
      peek: Returns a batch of training; the loss fails on one of evaluation that lacks an array of it.
    """
    mesh = run_mesh(recipe.mesh)
    loss_fn = task.loss_fn if mesh is None else constrain_shardings(task.loss_fn, mesh, task.sharding)
    place = partial(place_whole_batch, mesh=mesh) if mesh is not None else lambda batch: batch
    sums = EvaluationSums(eval_step(loss_fn, precision=run_policy(recipe), deterministic=recipe.deterministic), place)
    custom = task.evaluate

    def batches() -> Iterator[Any]:
        # An evaluation that generates samples needs no data.
        return iter(()) if task.validation is None else evaluation_batches(task.validation, task, recipe)

    def evaluate(state: TrainState) -> Evaluation:
        state = averaged(state)
        metrics, media = ({}, {}) if custom is None else split_media(custom(state, map(place, batches())))
        cause = None
        if not metrics and task.validation is not None:
            found = []
            for batch in batches():
                try:
                    found.append(sums(state, batch))
                except Exception as error:
                    if peek is not None:
                        _check_names(batch, peek(), error)
                    raise
                total = found[-1]["loss"].total
                told = cause or failed_assumption(task.loss_fn, total, batch)
                cause = told or cause_in_batch(total, suspects(task, batch))
            metrics = means(found)
        scores, answers = (
            ({}, {}) if task.evaluate_answers is None else split_media(task.evaluate_answers(state, False))
        )
        return Evaluation({**metrics, **scores}, {**media, **answers}, cause)

    return evaluate
