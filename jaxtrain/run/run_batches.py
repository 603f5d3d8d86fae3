"""The batches of a run, and the means of its evaluation, the same during the run and after it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.data import Batch, Kind, Rows, kind_of
from jaxtrain.data.batches import TrainingBatches, epoch_batches, training_batches
from jaxtrain.errors import UserError
from jaxtrain.run.recipe import Recipe
from jaxtrain.run.task import Task
from jaxtrain.step import TrainState


def task_batches(
    task: Task, recipe: Recipe, rows: Rows | None = None, message: Callable[[str], None] = lambda text: None
) -> TrainingBatches:
    """Return the training batches of a run.

    Args:
      task: The run's task.
      recipe: The run's recipe.
      rows: Row numbers of a batch to read; None for all.
      message: Prints one line.

    Raises:
      UserError: The data is of no known kind, or a setting does not apply to it.
    """
    return training_batches(
        task.train,
        recipe.batch_size,
        recipe.seed,
        workers=recipe.workers,
        rows=rows,
        accumulate=recipe.accumulate,
        collate=task.collate,
        batch_keys=task.batch_keys,
        message=message,
    )


def abstract_batch(recipe: Recipe, task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a training batch."""
    # A plan may be for larger batches than the source has examples: one of them shows the shapes.
    is_stacked = kind_of(task.train)[0] is Kind.SOURCE and task.collate is None
    batches = task_batches(task, dataclasses.replace(recipe, batch_size=1) if is_stacked else recipe)
    try:
        batch = batches.peek()
    finally:
        batches.close()
    return {name: jax.ShapeDtypeStruct((recipe.batch_size, *x.shape[1:]), x.dtype) for name, x in batch.items()}


def evaluation_batches(source: Any, task: Task, recipe: Recipe) -> Iterator[Batch]:
    """Iterate over the batches of an evaluation.

    Args:
      source: Data to evaluate, of any kind that `training_batches` takes.
      task: The run's task; `eval_rows` examples are evaluated, or all.
      recipe: The run's recipe; a batch has at most the rows of a micro-batch.

    Returns:
      An iterator of batches of equal size; the padding rows of the last one have weight 0.

    Raises:
      UserError: The data have no examples, or are of no known kind.
    """
    kind, data = kind_of(source)
    count = len(data) if task.eval_rows is None and kind is Kind.SOURCE else task.eval_rows
    if count == 0:
        raise UserError("the data to evaluate have no examples: give some, or leave Task.validation at None")
    rows = recipe.batch_size // recipe.accumulate
    if count is not None:
        rows = min(rows, count)
    limit = None if count is None else -(-count // rows)
    return epoch_batches(data, rows, limit=limit, collate=task.collate, batch_keys=task.batch_keys)


class EvaluationSums:
    """Evaluates batches; the padding rows of the last one never count.

    A loss that reads `batch["weight"]` leaves them out itself. One that does not is given its examples alone, which
    compiles the evaluation for their number.

    Args:
      step: Result of `eval_step`.
      place: Places a batch on the devices.
    """

    def __init__(
        self, step: Callable[[TrainState, Any], Mapping[str, Any]], place: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        self._step, self._place = step, place
        self._reads_weight: bool | None = None

    def __call__(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """Return the sums of a batch: name -> (total, weight)."""
        sums = self._evaluate(state, batch)
        is_padding = np.asarray(batch["weight"]).reshape(len(batch["weight"]), -1).max(1) == 0
        if not is_padding.any():
            return sums
        if self._reads_weight is None:
            without = self._evaluate(state, {**batch, "weight": np.zeros_like(batch["weight"])})
            self._reads_weight = jax.tree.leaves(sums) != jax.tree.leaves(without)
        if self._reads_weight:
            return sums
        return self._evaluate(state, {name: x[~is_padding] for name, x in batch.items()})

    def _evaluate(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        sums: dict[str, Any] = jax.device_get(self._step(state, self._place(batch)))
        return sums


def means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute weighted means over batches, accumulated in float64.

    Args:
      sums: Results of `eval_step` per batch: name -> (total, weight).

    Returns:
      The mean of each metric: name -> sum of totals / sum of weights.

    Example:
      >>> means([{"loss": (1.0, 1)}, {"loss": (5.0, 2)}])
      {'loss': 2.0}
    """
    totals = {name: np.sum([np.array(s[name], np.float64) for s in sums], axis=0) for name in sums[0]}
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
