"""Evaluate a model example by example: loss, predicted class or token, and confidence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.loader import Batch
from jaxtrain.losses import cross_entropy
from jaxtrain.step import TrainState, eval_step
from jaxtrain.tasks import Task, means
from jaxtrain.transforms import policy

BINS = 10


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of each example, [N], or of each of its tokens, [N, T]."""

    loss: NDArray[np.float32]
    """In nats."""
    weight: NDArray[np.float32]
    """0 where there is nothing to predict."""
    target: NDArray[np.int32]
    predicted: NDArray[np.int32]
    """The most probable class or token."""
    confidence: NDArray[np.float32]
    """Its probability."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def is_per_token(self) -> bool:
        """Whether every token is predicted, rather than one class per example."""
        return self.loss.ndim == 2

    def means(self) -> NDArray[np.float64]:
        """Return the mean loss of each example, float64[N]; NaN if it has nothing to predict."""
        loss, weight = (x.astype(np.float64).reshape(len(self), -1) for x in (self.loss, self.weight))
        total = weight.sum(-1)
        return np.divide((loss * weight).sum(-1), total, out=np.full(len(self), np.nan), where=total > 0)

    def worst(self, count: int) -> NDArray[np.intp]:
        """Return the indices of the `count` examples with the highest mean loss, in descending order."""
        means = self.means()
        order = np.argsort(-means, kind="stable")  # NaN sorts last
        return order[: min(count, int(np.isfinite(means).sum()))]


class Bin(NamedTuple):
    """Predictions of similar confidence."""

    predictions: int
    confidence: float
    """Mean confidence."""
    accuracy: float


def evaluate_examples(
    task: Task, state: TrainState, batches: Iterable[Batch], *, precision: str
) -> tuple[dict[str, float], Predictions]:
    """Evaluate a state on batches, example by example.

    The means equal those of the run's own evaluation: the same programs on the same batches.

    Args:
      task: The task of the run.
      state: The state to evaluate.
      batches: Evaluation batches, with a "weight" that marks their real rows.
      precision: Precision of the run.

    Returns:
      A tuple (means of the loss and of the task's metrics, predictions of each example).
    """
    evaluate = eval_step(task.loss_fn, precision=precision)
    predict = jax.jit(policy(precision).apply(lambda params, batch, model: _predict(task, params, batch, model)))
    sums, parts = [], []
    for batch in batches:
        sums.append(jax.device_get(evaluate(state, batch)))
        rows = int(batch["weight"].sum())
        arrays = jax.device_get(predict(state.params, batch, state.model_state))
        parts.append({name: x[:rows] for name, x in arrays.items()})
    metrics = means(sums)
    loss = {"loss": metrics.pop("loss")}  # comes first
    predictions = Predictions(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return loss | metrics, predictions


def _predict(task: Task, params: Any, batch: Any, model_state: Any) -> dict[str, jax.Array]:
    logits, targets, weight = task.predict(params, batch, model_state)
    return {
        "loss": cross_entropy(logits, targets),
        "weight": weight,
        "target": targets.astype(np.int32),
        "predicted": logits.argmax(-1).astype(np.int32),
        "confidence": jnp.exp(jax.nn.log_softmax(logits, axis=-1).max(-1)),
    }


def confusion(predictions: Predictions, classes: int) -> NDArray[np.int64]:
    """Return the confusion matrix, int64[classes, classes]: counts by target (row) and predicted class (column).

    >>> one = np.ones(3, np.float32)
    >>> confusion(Predictions(one, one, np.array([0, 1, 1]), np.array([0, 0, 1]), one), 2).tolist()
    [[1, 0], [1, 1]]
    """
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (predictions.target, predictions.predicted), 1)
    return counts


def calibration(predictions: Predictions) -> tuple[list[Bin], float]:
    """Compute the reliability diagram and the expected calibration error (Guo et al. 2017, arXiv:1706.04599).

    Returns:
      A tuple (`BINS` bins of equal width in confidence, the mean of |confidence - accuracy| over the bins, weighted by
      their predictions).

    Example:
      >>> one, sure = np.ones(2, np.float32), np.array([0.75, 0.75], np.float32)
      >>> bins, error = calibration(Predictions(one, one, np.array([0, 1]), np.array([0, 0]), sure))
      >>> bins[7], error
      (Bin(predictions=2, confidence=0.75, accuracy=0.5), 0.25)
    """
    counted = predictions.weight > 0
    confidence = predictions.confidence[counted].astype(np.float64)
    correct = (predictions.target == predictions.predicted)[counted].astype(np.float64)
    index = np.clip((confidence * BINS).astype(int), 0, BINS - 1)
    counts, sums, hits = (np.bincount(index, weights, BINS) for weights in (None, confidence, correct))
    bins = [
        Bin(int(n), float(total / n), float(hit / n)) if n else Bin(0, 0.0, 0.0)
        for n, total, hit in zip(counts, sums, hits, strict=True)
    ]
    error = sum(b.predictions * abs(b.confidence - b.accuracy) for b in bins) / max(len(confidence), 1)
    return bins, float(error)


def by_position(predictions: Predictions) -> list[float | None]:
    """Return the mean loss of the tokens at each position; None where none is predicted."""
    totals = (predictions.loss.astype(np.float64) * predictions.weight).sum(0)
    weights = predictions.weight.astype(np.float64).sum(0)
    return [float(total / weight) if weight else None for total, weight in zip(totals, weights, strict=True)]


def by_kind(predictions: Predictions, texts: Mapping[int, str]) -> dict[str, tuple[int, float]]:
    """Return (tokens, mean loss) for each kind of target token; `texts` decodes the tokens.

    >>> one = np.ones((1, 3), np.float32)
    >>> by_kind(Predictions(one, one, np.array([[0, 1, 1]]), np.zeros((1, 3)), one), {0: "a", 1: " "})
    {'letters': (1, 1.0), 'whitespace': (2, 1.0)}
    """
    kinds = {token: _kind(text) for token, text in texts.items()}
    found: dict[str, tuple[int, float]] = {}
    counted = predictions.weight > 0
    tokens, losses = predictions.target[counted], predictions.loss[counted].astype(np.float64)
    for token, kind in sorted(kinds.items(), key=lambda pair: pair[1]):
        token_losses = losses[tokens == token]
        if len(token_losses):
            count, mean = found.get(kind, (0, 0.0))
            total = count + len(token_losses)
            found[kind] = total, float((count * mean + token_losses.sum()) / total)
    return found


def _kind(text: str) -> str:
    bare = text.strip()
    if not bare:
        return "whitespace" if text else "special tokens"
    if "\ufffd" in bare:
        return "partial characters"
    if bare.isalpha():
        return "letters"
    return "digits" if bare.isdecimal() else "mixed" if any(map(str.isalnum, bare)) else "punctuation"
