"""Batches and means of an evaluation, the same during a run and after it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data import Source
from jaxtrain.data.loader import Batch, epoch_batches
from jaxtrain.recipes import Recipe
from jaxtrain.tasks.task import Task


def evaluation_batches(source: Source, task: Task, recipe: Recipe) -> Iterator[Batch]:
    """Iterate over the batches of an evaluation.

    Args:
      source: Examples to evaluate.
      task: The run's task; `eval_rows` examples are evaluated.
      recipe: The run's recipe; a batch has at most the rows of a micro-batch.

    Returns:
      An iterator of batches of equal size; the padding rows of the last one have weight 0.
    """
    rows = min(recipe.batch_size // recipe.accumulate, task.eval_rows)
    return epoch_batches(source, rows, limit=-(-task.eval_rows // rows))


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
