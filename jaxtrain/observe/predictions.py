"""Evaluate a model example by example: loss, predicted class or token, and confidence."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.loader import Batch
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.passes import Policy, convert_where_used, policy
from jaxtrain.run import EvaluationSums, Task, means
from jaxtrain.run import Predictions as ClassLogits
from jaxtrain.step import TrainState, eval_step

BINS = 10


@dataclass(frozen=True, eq=False)
class Evaluated:
    """The loss of each example, [N], or of each of its tokens, [N, T]."""

    loss: NDArray[np.float32]
    """In nats for classes and tokens."""
    weight: NDArray[np.float32]
    """0 where there is nothing to predict."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def is_per_token(self) -> bool:
        """Whether every token is predicted, rather than once per example."""
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


@dataclass(frozen=True, eq=False)
class Predictions(Evaluated):
    """Predicted class of each example, [N], or of each of its tokens, [N, T]."""

    target: NDArray[np.int32]
    predicted: NDArray[np.int32]
    """The most probable class or token."""
    confidence: NDArray[np.float32]
    """Its probability."""
    classes: int = 0
    """Number of classes of the logits."""


@dataclass(frozen=True, eq=False)
class Outputs(Evaluated):
    """What a `predict` returns that predicts no classes."""

    values: Any
    """Pytree of arrays, [N, ...]."""

    def of(self, i: int) -> Any:
        """Return the output of example `i`, as numbers and lists."""
        return jax.tree.map(lambda x: x[i].tolist(), self.values)


class Bin(NamedTuple):
    """Predictions of similar confidence."""

    predictions: int
    confidence: float
    """Mean confidence."""
    accuracy: float


def evaluate_examples(
    task: Task, state: TrainState, batches: Iterable[Batch], *, precision: str | Policy
) -> tuple[dict[str, float], Predictions | Outputs]:
    """Evaluate a state on batches, example by example.

    The means equal those of the run's own evaluation: the same programs on the same batches.

    Args:
      task: The task of the run.
      state: The state to evaluate.
      batches: Evaluation batches, with a "weight" that marks their real rows.
      precision: Precision of the run.

    Returns:
      A tuple (means of the loss and of the task's metrics, predictions of each example; its outputs if `predict` does
      not return `jaxtrain.Predictions`).

    Raises:
      UserError: The task has no `predict`.
    """
    model = task.predict
    if model is None:
        raise UserError("the task has no `predict`, which returns a batch's predictions: define Task.predict")
    evaluate = eval_step(task.loss_fn, precision=precision)
    batch_sums, compute = EvaluationSums(evaluate), _in_precision(model, precision)
    sums: list[Any] = []
    parts: list[Any] = []
    classes = None
    for batch in batches:
        if not sums:
            found = jax.eval_shape(compute, state.params, batch, state.model_state)
            classes = found.logits.shape[-1] if isinstance(found, ClassLogits) else None
            # The losses of logits are computed in the dtypes of the run's evaluation.
            scored = _in_precision(partial(_classes, model), precision)
            examples = jax.jit(partial(_outputs, compute, evaluate) if classes is None else partial(_of_state, scored))
        sums.append(batch_sums(state, batch))
        rows = int(batch["weight"].sum())
        parts.append(jax.tree.map(lambda x, n=rows: x[:n], jax.device_get(examples(state, batch))))
    metrics = means(sums)
    loss = {"loss": metrics.pop("loss")}  # comes first
    arrays = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return loss | metrics, Outputs(**arrays) if classes is None else Predictions(**arrays, classes=classes)


def _in_precision(model: Callable[..., Any], precision: Any) -> Callable[..., Any]:
    """Return a function of (params, batch, model_state) as a training step computes it."""
    numerics = policy(precision)
    return convert_where_used(numerics.apply(model, state_argnums=(2,)), numerics.param_dtype)


def _of_state(compute: Callable[..., Any], state: TrainState, batch: Any) -> Any:
    return compute(state.params, batch, state.model_state)


def _classes(predict: Callable[..., Any], params: Any, batch: Any, model_state: Any) -> dict[str, jax.Array]:
    logits, targets, weight = predict(params, batch, model_state)
    return {
        "loss": cross_entropy(logits, targets),
        "weight": weight,
        "target": targets.astype(np.int32),
        "predicted": logits.argmax(-1).astype(np.int32),
        "confidence": jnp.exp(jax.nn.log_softmax(logits, axis=-1).max(-1)),
    }


def _outputs(compute: Callable[..., Any], evaluate: Any, state: TrainState, batch: Any) -> dict[str, Any]:
    """Return the outputs of a batch, and the loss that each example has in a batch of its own."""
    each = jax.vmap(lambda row: evaluate(state, jax.tree.map(lambda x: x[None], row))["loss"])
    total, weight = each(batch)
    loss = total / jnp.where(weight > 0, weight, 1)
    return {"loss": loss, "weight": weight, "values": compute(state.params, batch, state.model_state)}


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
