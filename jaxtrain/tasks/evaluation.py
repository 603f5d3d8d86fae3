"""What an evaluation is taken over and made of, during a run and after it: the same batches, the same means."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data import Source
from jaxtrain.data.loader import Batch, epoch_batches
from jaxtrain.recipes import Recipe
from jaxtrain.tasks.task import Task


def evaluation_batches(source: Source, task: Task, recipe: Recipe) -> Iterator[Batch]:
    """As many whole batches of `source` as hold `task.eval_rows` examples, each of a micro-batch's size at most."""
    rows = min(recipe.batch_size // recipe.accumulate, task.eval_rows)
    return epoch_batches(source, rows, limit=-(-task.eval_rows // rows))


def means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means, added in float64, of what `eval_step` gave for each batch: name -> (total, weight).

    >>> means([{"loss": (1.0, 1)}, {"loss": (5.0, 2)}])
    {'loss': 2.0}
    """
    totals = {name: np.sum([np.array(s[name], np.float64) for s in sums], axis=0) for name in sums[0]}
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
