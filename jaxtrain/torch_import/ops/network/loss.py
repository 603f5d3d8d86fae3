"""Losses, with `reduction` 0 for none, 1 for the mean and 2 for the sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import losses
from jaxtrain.torch_import.ops.elementwise import xlogy
from jaxtrain.torch_import.ops.table import in_opmath, op, ops

_NONE, _MEAN, _SUM = range(3)


def _reduced(values: jax.Array, reduction: int) -> jax.Array:
    return values if reduction == _NONE else values.mean() if reduction == _MEAN else values.sum()


def _elementwise(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a loss of (prediction, target) with PyTorch's reduction."""

    @in_opmath
    def reduced(x: jax.Array, target: jax.Array, reduction: int = _MEAN, *options: float) -> jax.Array:
        return _reduced(loss(*jnp.broadcast_arrays(x, target), *options), reduction)

    return reduced


ops(
    {
        "mse_loss.default": _elementwise(losses.mse),
        "l1_loss.default": _elementwise(losses.l1),
        "smooth_l1_loss.default": _elementwise(lambda x, y, beta=1.0: losses.smooth_l1(x, y, beta=beta)),
        "huber_loss.default": _elementwise(lambda x, y, delta=1.0: losses.huber(x, y, delta=delta)),
        "soft_margin_loss.default": _elementwise(lambda x, y: jax.nn.softplus(-y * x)),
    }
)


@op("cross_entropy_loss.default")
@in_opmath
def cross_entropy(
    logits: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Cross-entropy of logits with the classes on the second axis, or the only one."""
    classes_last = jnp.moveaxis(logits, 1 if logits.ndim > 1 else 0, -1)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return _with_probabilities(classes_last, target, weight, reduction, label_smoothing)
    values = losses.cross_entropy(
        classes_last, target, ignore_index=ignore_index, label_smoothing=label_smoothing, class_weight=weight
    )
    return _over_labels(values, target, weight, reduction, ignore_index)


def _over_labels(
    values: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> jax.Array:
    """Reduce losses per label. Their mean is over the labels that are not ignored, weighted by class."""
    if reduction != _MEAN:
        return _reduced(values, reduction)
    weights = (target != ignore_index).astype(values.dtype)
    if weight is not None:
        weights *= weight[jnp.where(target == ignore_index, 0, target)]
    return values.sum() / weights.sum()


def _with_probabilities(
    logits: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, label_smoothing: float
) -> jax.Array:
    """Cross-entropy with probabilities in place of labels. Its mean is over the examples."""
    probabilities = jnp.moveaxis(target, 1 if target.ndim > 1 else 0, -1)
    if label_smoothing:
        probabilities = probabilities * (1 - label_smoothing) + label_smoothing / probabilities.shape[-1]
    terms = probabilities * jax.nn.log_softmax(logits)
    return _reduced(-(terms if weight is None else terms * weight).sum(-1), reduction)


@op("nll_loss.default", "nll_loss_nd.default", "nll_loss2d.default")
@in_opmath
def nll_loss(
    log_probs: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> jax.Array:
    """Negative log-likelihood with the classes on the second axis, or the only one."""
    classes_last = jnp.moveaxis(log_probs, 1 if log_probs.ndim > 1 else 0, -1)
    values = losses.nll(classes_last, target, ignore_index=ignore_index, class_weight=weight)
    return _over_labels(values, target, weight, reduction, ignore_index)


@op("nll_loss_forward.default", "nll_loss2d_forward.default")
@in_opmath
def nll_loss_forward(
    log_probs: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, Any]:
    """Negative log-likelihood with its total weight, which is 0 for losses that are not reduced."""
    value = nll_loss(log_probs, target, weight, reduction, ignore_index)
    counts = jnp.full_like(log_probs, 0.0 if reduction == _NONE and log_probs.ndim > 1 else -1.0)
    return value, nll_loss(counts, target, weight, _SUM, ignore_index)


@op("binary_cross_entropy_with_logits.default")
@in_opmath
def binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    """Binary cross-entropy of logits."""
    values = losses.binary_cross_entropy_with_logits(x, target, pos_weight=pos_weight)
    return _reduced(values if weight is None else values * weight, reduction)


@op("binary_cross_entropy.default")
@in_opmath
def binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    """Binary cross-entropy of probabilities, whose logarithms are at least -100."""
    values = _binary_cross_entropy(x, target)
    return _reduced(values if weight is None else values * weight, reduction)


@jax.custom_jvp
def _binary_cross_entropy(x: jax.Array, target: jax.Array) -> jax.Array:
    log, log_of_rest = (jnp.maximum(y, -100) for y in (jnp.log(x), jnp.log1p(-x)))
    return (target - 1) * log_of_rest - target * log


# PyTorch's gradient is finite at 0 and 1 (`binary_cross_entropy_backward` in `aten/src/ATen/native/Loss.cpp`), where
# its constant is one of float32.
_LEAST = float(np.float32(1e-12))
_binary_cross_entropy.defjvps(
    lambda tangent, _, x, target: tangent * (x - target) / jnp.maximum(x * (1 - x), _LEAST),
    lambda tangent, _, x, target: tangent * (jnp.log1p(-x) - jnp.log(x)),
)


@op("kl_div.default")
@in_opmath
def kl_div(x: jax.Array, target: jax.Array, reduction: int = _MEAN, *, log_target: bool = False) -> jax.Array:
    """Kullback-Leibler divergence of log-probabilities."""
    if log_target:
        return _reduced(jnp.exp(target) * (target - x), reduction)
    return _reduced(xlogy(target, target) - target * x, reduction)


@op("multilabel_margin_loss.default")
def multilabel_margin_loss(x: jax.Array, target: jax.Array, reduction: int = _MEAN) -> jax.Array:
    """Multi-label margin loss, of the classes before the first negative one. At the margin the gradient is 0."""
    return multilabel_margin_loss_forward(x, target, reduction)[0]


@op("multilabel_margin_loss_forward.default")
@in_opmath
def multilabel_margin_loss_forward(x: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    """Multi-label margin loss, with a mask of the classes that are targets."""
    scores, labels = jnp.atleast_2d(x), jnp.atleast_2d(target)
    given = jnp.cumsum(labels < 0, 1) == 0
    classes = jnp.where(given, labels, 0)
    is_target = ((classes[..., None] == jnp.arange(scores.shape[1])) & given[..., None]).any(1)
    terms = _above(1 - jnp.take_along_axis(scores, classes, 1)[..., None] + scores[:, None])
    values = jnp.where(given[..., None] & ~is_target[:, None], terms, 0).sum((1, 2)) / scores.shape[1]
    return _reduced(values.reshape(x.shape[:-1]), reduction), is_target.astype(x.dtype).reshape(target.shape)


def _above(x: jax.Array) -> jax.Array:
    """Return max(x, 0), with gradient 0 at 0."""
    return jnp.where(x > 0, x, 0)
