"""The best evaluation of a run, and when to stop for want of a better one."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError


class Patience:
    """Counts the evaluations in a row that are not better than the best one.

    Args:
      limit: Stop after this many; None never stops.
      metric: Metric of an evaluation to compare, with or without the prefix `eval_` that metrics.jsonl has.
      is_highest_best: Whether higher values are better.

    Example:
      >>> patience = Patience(2, "accuracy", is_highest_best=True)
      >>> [patience.add({"accuracy": x}) for x in (0.5, 0.7, 0.6, 0.7)]
      [-0.5, -0.7, -0.6, -0.7]
      >>> patience.is_exhausted
      True
    """

    def __init__(self, limit: int | None, metric: str = "loss", *, is_highest_best: bool = False) -> None:
        self._limit, self._metric, self._sign = limit, metric, -1 if is_highest_best else 1
        self._best, self._count = math.inf, 0

    @property
    def is_exhausted(self) -> bool:
        """Whether to stop."""
        return self._limit is not None and self._count >= self._limit

    def score(self, evaluation: Mapping[str, float]) -> float | None:
        """Return the score of an evaluation, lower is better; None for one without metrics.

        Raises:
          UserError: It lacks the metric.
        """
        if not evaluation:
            return None
        # metrics.jsonl has the prefix.
        name = self._metric if self._metric in evaluation else self._metric.removeprefix("eval_")
        if name not in evaluation:
            raise UserError(
                f"best_metric {self._metric!r} is not a metric of the evaluation: set Task.best_metric to one of "
                f"{', '.join(evaluation)}"
            )
        return self._sign * evaluation[name]

    def add(self, evaluation: Mapping[str, float]) -> float | None:
        """Add an evaluation and return its score."""
        score = self.score(evaluation)
        if score is not None:
            self._count = 0 if score < self._best else self._count + 1
            self._best = min(score, self._best)
        return score

    def message(self, step: int) -> str:
        """Return why the run stops."""
        return f"step {step}: stopped: {self._count} evaluations without a better {self._metric}"

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        return {"best": self._best if math.isfinite(self._best) else None, "count": self._count}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state()`."""
        if state:
            self._best = math.inf if state["best"] is None else state["best"]
            self._count = state["count"]
