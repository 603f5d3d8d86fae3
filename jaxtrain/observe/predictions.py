"""What a model makes of each example of a split: its losses, what it holds likeliest, and how sure it is."""

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
    """Of each example [N], or of each of its tokens [N, T].

    `loss`, in nats; `weight`, 0 where there is nothing to predict; `target`; `predicted`, the likeliest; `confidence`,
    the probability of that.
    """

    loss: NDArray[np.float32]
    weight: NDArray[np.float32]
    target: NDArray[np.int32]
    predicted: NDArray[np.int32]
    confidence: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.loss)

    def of_tokens(self) -> bool:
        """Whether every token is predicted, rather than a class."""
        return self.loss.ndim == 2

    def means(self) -> NDArray[np.float64]:
        """The mean loss of each example [N]; NaN of one in which there is nothing to predict."""
        loss, weight = (x.astype(np.float64).reshape(len(self), -1) for x in (self.loss, self.weight))
        whole = weight.sum(-1)
        return np.divide((loss * weight).sum(-1), whole, out=np.full(len(self), np.nan), where=whole > 0)

    def worst(self, count: int) -> NDArray[np.intp]:
        """The examples of the highest mean loss, that first."""
        means = self.means()
        order = np.argsort(-means, kind="stable")  # NaN comes last
        return order[: min(count, int(np.isfinite(means).sum()))]


class Bin(NamedTuple):
    """Predictions of about one confidence: their number, their mean confidence, the share of them that is right."""

    predictions: int
    confidence: float
    accuracy: float


def evaluate_examples(
    task: Task, state: TrainState, batches: Iterable[Batch], *, precision: str
) -> tuple[dict[str, float], Predictions]:
    """The means of the loss and of the task's metrics over `batches`, and the predictions they are of.

    The means are those of the run's own evaluation, by the same programs on the same batches.
    """
    evaluate = eval_step(task.loss_fn, precision=precision)
    judge = jax.jit(policy(precision).apply(lambda params, batch, model: _judged(task, params, batch, model)))
    sums, parts = [], []
    for batch in batches:
        sums.append(jax.device_get(evaluate(state, batch)))
        real = int(batch["weight"].sum())
        parts.append(
            {name: x[:real] for name, x in jax.device_get(judge(state.params, batch, state.model_state)).items()}
        )
    of_metrics = means(sums)
    of_loss = {"loss": of_metrics.pop("loss")}  # which comes first
    return of_loss | of_metrics, Predictions(
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    )


def _judged(task: Task, params: Any, batch: Any, model_state: Any) -> dict[str, jax.Array]:
    logits, targets, weight = task.predict(params, batch, model_state)
    return {
        "loss": cross_entropy(logits, targets),
        "weight": weight,
        "target": targets.astype(np.int32),
        "predicted": logits.argmax(-1).astype(np.int32),
        "confidence": jnp.exp(jax.nn.log_softmax(logits, axis=-1).max(-1)),
    }


def confusion(predictions: Predictions, classes: int) -> NDArray[np.int64]:
    """[classes, classes]: how many of each target (row) were taken for each class (column).

    >>> one = np.ones(3, np.float32)
    >>> confusion(Predictions(one, one, np.array([0, 1, 1]), np.array([0, 0, 1]), one), 2).tolist()
    [[1, 0], [1, 1]]
    """
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (predictions.target, predictions.predicted), 1)
    return counts


def calibration(predictions: Predictions) -> tuple[list[Bin], float]:
    """(a reliability diagram, the expected calibration error): of `BINS` equal widths of confidence, and the mean
    distance of confidence to accuracy over them, each weighed by its predictions (Guo et al. 2017, arXiv:1706.04599).

    >>> one, sure = np.ones(2, np.float32), np.array([0.75, 0.75], np.float32)
    >>> bins, error = calibration(Predictions(one, one, np.array([0, 1]), np.array([0, 0]), sure))
    >>> bins[7], error
    (Bin(predictions=2, confidence=0.75, accuracy=0.5), 0.25)
    """
    counted = predictions.weight > 0
    sure = predictions.confidence[counted].astype(np.float64)
    right = (predictions.target == predictions.predicted)[counted].astype(np.float64)
    place = np.clip((sure * BINS).astype(int), 0, BINS - 1)
    counts, sums, hits = (np.bincount(place, weights, BINS) for weights in (None, sure, right))
    bins = [
        Bin(int(n), float(total / n), float(hit / n)) if n else Bin(0, 0.0, 0.0)
        for n, total, hit in zip(counts, sums, hits, strict=True)
    ]
    error = sum(b.predictions * abs(b.confidence - b.accuracy) for b in bins) / max(len(sure), 1)
    return bins, float(error)


def by_position(predictions: Predictions) -> list[float | None]:
    """The mean loss of the tokens at each place; None where none is predicted."""
    totals = (predictions.loss.astype(np.float64) * predictions.weight).sum(0)
    weights = predictions.weight.astype(np.float64).sum(0)
    return [float(total / weight) if weight else None for total, weight in zip(totals, weights, strict=True)]


def by_kind(predictions: Predictions, texts: Mapping[int, str]) -> dict[str, tuple[int, float]]:
    """(tokens, mean loss) of each kind of target; `texts`: those of the tokens.

    >>> one = np.ones((1, 3), np.float32)
    >>> by_kind(Predictions(one, one, np.array([[0, 1, 1]]), np.zeros((1, 3)), one), {0: "a", 1: " "})
    {'letters': (1, 1.0), 'space': (2, 1.0)}
    """
    kinds = {token: _kind(text) for token, text in texts.items()}
    found: dict[str, tuple[int, float]] = {}
    counted = predictions.weight > 0
    tokens, losses = predictions.target[counted], predictions.loss[counted].astype(np.float64)
    for token, text in sorted(kinds.items(), key=lambda pair: pair[1]):
        of_token = losses[tokens == token]
        if len(of_token):
            count, mean = found.get(text, (0, 0.0))
            whole = count + len(of_token)
            found[text] = whole, float((count * mean + of_token.sum()) / whole)
    return found


def _kind(text: str) -> str:
    bare = text.strip()
    if not bare:
        return "space" if text else "marks of the tokenizer"
    if "\ufffd" in bare:
        return "parts of characters"
    if bare.isalpha():
        return "letters"
    return "digits" if bare.isdecimal() else "words and signs" if any(map(str.isalnum, bare)) else "signs"
