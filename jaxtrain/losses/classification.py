"""Losses of classifiers: the classes are on the last axis, where PyTorch has them on the second."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxtrain.errors import UserError
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
    """Negative log-likelihood in nats: logits [..., classes], integer labels [...] → [...].

    `torch.nn.functional.cross_entropy(reduction="none")`: the loss of a label that is `ignore_index` is 0; others are
    times the `class_weight` [classes] of their label. With `label_smoothing` that part of a label is spread evenly
    over the classes, each with its own weight. PyTorch's "mean" is their sum over the sum of `label_weights`.

    Any other label outside the classes makes its loss NaN and its logits' gradient too, where PyTorch raises: values
    cannot raise under jit. `UserError` for shapes that do not fit and a smoothing outside 0 to 1.

    >>> round(float(cross_entropy(jnp.zeros(10), jnp.int32(3))), 4)
    2.3026
    >>> print(cross_entropy(jnp.zeros((3, 2)), jnp.array([0, -100, 7])).round(4))
    [0.6931 0.        nan]
    """
    _check_labels(logits, labels, class_weight)
    if not 0.0 <= label_smoothing <= 1.0:
        raise UserError(f"label_smoothing {label_smoothing} is no part of a label: choose one from 0 to 1")
    # Of logits less their largest, as PyTorch's: what all have in common would cost digits.
    largest = lax.stop_gradient(logits.max(-1))
    normaliser = jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    losses = _weighted(normaliser - (_picked(logits, labels) - largest), labels, class_weight)
    if label_smoothing:
        of_each = normaliser[..., None] - (logits - largest[..., None])
        if class_weight is not None:
            of_each *= jnp.asarray(class_weight, logits.dtype).reshape((1,) * labels.ndim + (-1,))
        losses = (1 - label_smoothing) * losses + label_smoothing * of_each.mean(-1)
    return _counted(losses, labels, logits.shape[-1], ignore_index)


@operation("ignore_index")
def nll(
    log_probs: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    class_weight: ArrayLike | None = None,
) -> jax.Array:
    """`torch.nn.functional.nll_loss(reduction="none")`: log-probabilities [..., classes], integer labels [...] → [...].

    Labels and weights are those of `cross_entropy`, which this is of `jax.nn.log_softmax(logits)`.

    >>> print(nll(jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([1])).round(4))
    [0.6931]
    """
    _check_labels(log_probs, labels, class_weight)
    losses = _weighted(-_picked(log_probs, labels), labels, class_weight)
    return _counted(losses, labels, log_probs.shape[-1], ignore_index)


def label_weights(labels: jax.Array, *, ignore_index: int = -100, class_weight: ArrayLike | None = None) -> jax.Array:
    """What each label [...] weighs in PyTorch's mean: its class's weight, or 1; 0 if it is `ignore_index`.

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
    """`torch.nn.functional.binary_cross_entropy_with_logits(reduction="none")`: logits and probabilities [...] → [...].

    `pos_weight`, a number or [classes] along the last axis, multiplies what is lost where the target is 1.

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
    """`torch.nn.functional.kl_div(reduction="none")`: log-probabilities and probabilities [...] → [...], each element's
    part of the divergence of the targets from the prediction.

    With `log_target` the targets are log-probabilities too. Sum over the classes for the divergence of an example;
    PyTorch's "mean" divides by the elements, its "batchmean" by the rows.

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
            f"the loss was given {scores.dtype}{list(scores.shape)} and labels {labels.dtype}{list(labels.shape)}: "
            f"give it integer labels {list(scores.shape[:-1])}, the classes last"
        )
    if class_weight is not None and jnp.shape(class_weight) != scores.shape[-1:]:
        raise UserError(f"class_weight is {list(jnp.shape(class_weight))}: make it {list(scores.shape[-1:])}")


def _picked(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, labels[..., None], axis=-1, mode="clip")[..., 0]


def _weighted(losses: jax.Array, labels: jax.Array, class_weight: ArrayLike | None) -> jax.Array:
    if class_weight is None:
        return losses
    return losses * jnp.asarray(class_weight, losses.dtype).at[labels].get(mode="clip")


def _counted(losses: jax.Array, labels: jax.Array, classes: int, ignore_index: int) -> jax.Array:
    ignored = labels == ignore_index
    known = ignored | ((labels >= 0) & (labels < classes))
    # Times NaN where it is not known, rather than NaN: so that the gradient is NaN too.
    return jnp.where(ignored, 0, losses * jnp.where(known, 1, math.nan).astype(losses.dtype))
