"""A stand-in for evaluate: accuracy."""

from typing import Any

import torch


class _Accuracy:
    """The share of predictions that are the references."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Add the predictions of a batch."""
        self._right += (predictions == references).tolist()

    def compute(self, **kwargs: Any) -> dict[str, float]:
        """Return the accuracy, and begin anew."""
        right, self._right = self._right, []
        return {"accuracy": sum(right) / max(1, len(right))}


def load(*args: Any, **kwargs: Any) -> _Accuracy:
    """Return a metric."""
    return _Accuracy()
