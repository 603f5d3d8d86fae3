"""Losses for classification. The classes are on the last axis; PyTorch has them on the second."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.errors import UserError
from jaxtrain.losses.normalizer import log_normalizer
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike


@operation("ignore_index", "label_smoothing")
def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: ArrayLike | None = None,
) -> jax.Array:
    """Cross-entropy of logits, in nats, as `torch.nn.functional.cross_entropy(reduction="none")`.

    PyTorch's "mean" is the sum of these losses over the sum of `label_weights`. Values cannot raise under jit: a label
    outside the classes, for which PyTorch raises, makes its loss and the gradient of its logits NaN.

    Args:
      logits: float[..., classes].
      labels: int[...].
      ignore_index: Label whose loss is 0.
      label_smoothing: Part of a label, in [0, 1], that is spread evenly over the classes, each with its own weight.
      class_weight: float[classes], factor of the loss of each label; None for 1.

    Returns:
      float[...].

    Raises:
      UserError: The shapes do not fit, or `label_smoothing` is out of range.

    Example:
      >>> round(float(cross_entropy(jnp.zeros(10), jnp.int32(3))), 4)
      2.3026
      >>> print(cross_entropy(jnp.zeros((3, 2)), jnp.array([0, -100, 7])).round(4))
      [0.6931 0.        nan]
    """
    _check_labels(logits, labels, class_weight)
    if not 0.0 <= label_smoothing <= 1.0:
        raise UserError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    # Relative to the largest logit, as in PyTorch: a common offset would cost digits.
    largest, normalizer = log_normalizer(logits)
    losses = _apply_class_weight(normalizer - (_score_of_label(logits, labels) - largest), labels, class_weight)
    if label_smoothing:
        per_class = normalizer[..., None] - (logits - largest[..., None])
        if class_weight is not None:
            per_class *= jnp.asarray(class_weight, logits.dtype).reshape((1,) * labels.ndim + (-1,))
        losses = (1 - label_smoothing) * losses + label_smoothing * per_class.mean(-1)
    return _mask_labels(losses, labels, logits.shape[-1], ignore_index)


@operation("ignore_index")
def nll(
    log_probs: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    class_weight: ArrayLike | None = None,
) -> jax.Array:
    """Negative log-likelihood, as `torch.nn.functional.nll_loss(reduction="none")`.

    `cross_entropy(logits)` is `nll(jax.nn.log_softmax(logits))`. As there, a label outside the classes gives NaN.

    Args:
      log_probs: float[..., classes].
      labels: int[...].
      ignore_index: Label whose loss is 0.
      class_weight: float[classes], factor of the loss of each label; None for 1.

    Returns:
      float[...].

    Raises:
      UserError: The shapes do not fit.

    Example:
      >>> print(nll(jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([1])).round(4))
      [0.6931]
    """
    _check_labels(log_probs, labels, class_weight)
    losses = _apply_class_weight(-_score_of_label(log_probs, labels), labels, class_weight)
    return _mask_labels(losses, labels, log_probs.shape[-1], ignore_index)


def label_weights(labels: jax.Array, *, ignore_index: int = -100, class_weight: ArrayLike | None = None) -> jax.Array:
    """Return the weight of each label in PyTorch's "mean": its class's weight, or 1; 0 for `ignore_index`.

    Args:
      labels: int[...].
      ignore_index: Label whose weight is 0.
      class_weight: float[classes]; None for 1.

    Returns:
      float[...].

    Example:
      >>> import jaxtrain
      >>> logits, labels = jnp.zeros((3, 2)), jnp.array([0, -100, 1])
      >>> loss = jaxtrain.Loss(cross_entropy(logits, labels).sum(), label_weights(labels).sum())
      >>> float(loss.weight)
      2.0
    """
    weight: ArrayLike = 1.0
    if class_weight is not None:
        weight = jnp.asarray(class_weight).at[labels].get(mode="clip")
    return jnp.where(labels == ignore_index, 0.0, weight)


@operation()
def binary_cross_entropy_with_logits(
    logits: jax.Array, targets: jax.Array, *, pos_weight: ArrayLike | None = None
) -> jax.Array:
    """Binary cross-entropy, as `torch.nn.functional.binary_cross_entropy_with_logits(reduction="none")`.

    Args:
      logits: float[...].
      targets: float[...], probabilities, the same shape.
      pos_weight: Number or float[classes] along the last axis: factor of the loss where the target is 1.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> print(binary_cross_entropy_with_logits(jnp.zeros(2), jnp.array([0.0, 1.0]), pos_weight=3.0).round(4))
      [0.6931 2.0794]
    """
    require_alike(logits=logits, targets=targets)
    positive: jax.Array | float = 1.0
    if pos_weight is not None:
        weight = jnp.asarray(pos_weight, logits.dtype)
        positive = 1 + (weight.reshape((1,) * (logits.ndim - weight.ndim) + weight.shape) - 1) * targets
    return (1 - targets) * logits + positive * jax.nn.softplus(-logits)


@operation("log_target")
def kl_div(log_probs: jax.Array, targets: jax.Array, *, log_target: bool = False) -> jax.Array:
    """Kullback-Leibler divergence per element, as `torch.nn.functional.kl_div(reduction="none")`.

    The sum over the classes is the divergence of an example's targets from its prediction. PyTorch's "mean" divides by
    the number of elements, its "batchmean" by the number of rows.

    Args:
      log_probs: float[...], log-probabilities.
      targets: float[...], probabilities, the same shape.
      log_target: Whether the targets are log-probabilities.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> print(kl_div(jnp.log(jnp.array([0.5, 0.5])), jnp.array([1.0, 0.0])).round(4))
      [0.6931 0.    ]
    """
    require_alike(log_probs=log_probs, targets=targets)
    if log_target:
        return jnp.exp(targets) * (targets - log_probs)
    return jax.scipy.special.xlogy(targets, targets) - targets * log_probs


def _check_labels(scores: jax.Array, labels: jax.Array, class_weight: ArrayLike | None) -> None:
    if labels.shape != scores.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UserError(
            f"labels of {scores.dtype}{list(scores.shape)} must be integers {list(scores.shape[:-1])}, classes last, "
            f"got {labels.dtype}{list(labels.shape)}"
        )
    if class_weight is not None and jnp.shape(class_weight) != scores.shape[-1:]:
        raise UserError(f"class_weight must have shape {list(scores.shape[-1:])}, got {list(jnp.shape(class_weight))}")


@jax.custom_jvp
def _score_of_label(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, labels[..., None], axis=-1, mode="clip")[..., 0]


@_score_of_label.defjvp
def _score_of_label_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # By comparison: the transpose of an index is a scatter into zeros, which no compiler fuses with the softmax.
    (scores, labels), (tangent, _) = primals, tangents
    classes = scores.shape[-1]
    index = lax.broadcasted_iota(labels.dtype, scores.shape, scores.ndim - 1)
    is_label = index == jnp.clip(labels, 0, classes - 1)[..., None]
    return _score_of_label(scores, labels), jnp.where(is_label, tangent, 0).sum(-1)


def _apply_class_weight(losses: jax.Array, labels: jax.Array, class_weight: ArrayLike | None) -> jax.Array:
    if class_weight is None:
        return losses
    return losses * jnp.asarray(class_weight, losses.dtype).at[labels].get(mode="clip")


def _mask_labels(losses: jax.Array, labels: jax.Array, classes: int, ignore_index: int) -> jax.Array:
    ignored = labels == ignore_index
    is_valid = ignored | ((labels >= 0) & (labels < classes))
    # Multiplied by NaN for an invalid label, so that the gradient is NaN too.
    return jnp.where(ignored, 0, losses * jnp.where(is_valid, 1, math.nan).astype(losses.dtype))
