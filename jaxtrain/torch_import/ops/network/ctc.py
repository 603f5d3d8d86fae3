"""Connectionist temporal classification (Graves et al. 2006)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.torch_import.ops.table import op

_MEAN, _SUM = 1, 2
_NEVER = -1e30
"""Log-probability of what cannot happen: infinities have no gradient."""


@op("ctc_loss.default", library="jaxtrain")
def ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> jax.Array:
    """The loss of log-probabilities [time, N, classes], of targets [N, length] or concatenated ones."""
    shape = log_probs.shape[1:-1]
    log_probs = log_probs[:, None] if log_probs.ndim == 2 else log_probs
    steps, labels = input_lengths.ravel(), target_lengths.ravel()
    losses = _losses(log_probs, _padded(targets, labels), steps, labels, blank)
    if zero_infinity:
        losses = jnp.where(jnp.isinf(losses), 0, losses)
    if reduction == _MEAN:
        return (losses / jnp.maximum(labels, 1)).mean()
    return losses.sum() if reduction == _SUM else losses.reshape(shape)


def _padded(targets: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return targets as [N, length]; concatenated ones padded to the length of all of them."""
    if targets.ndim == 2:
        return targets
    if len(lengths) == 1:
        return targets[None]
    first = jnp.cumsum(lengths) - lengths
    places = first[:, None] + jnp.arange(max(targets.shape[0], 1))
    return jnp.take(targets, jnp.minimum(places, targets.shape[0] - 1)) if targets.size else jnp.zeros_like(places)


def _losses(log_probs: jax.Array, targets: jax.Array, steps: jax.Array, labels: jax.Array, blank: int) -> jax.Array:
    """Return the negative log-probability of each sequence of labels."""
    rows, length = targets.shape
    path = jnp.full((rows, 2 * length + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    places = jnp.arange(path.shape[1])
    inside = places <= 2 * labels[:, None]
    skips = (places >= 2) & (path != blank) & (path != jnp.roll(path, 2, 1))
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(path, (len(log_probs), *path.shape)), 2)
    start = jnp.where((places < 2) & inside, emitted[0], _NEVER)

    def step(alpha: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, emission = now
        total = jnp.logaddexp(alpha, _shifted(alpha, 1))
        total = jnp.logaddexp(total, jnp.where(skips, _shifted(alpha, 2), _NEVER)) + emission
        return jnp.where((time < steps)[:, None] & inside, total, alpha), None

    alpha, _ = lax.scan(step, start, (jnp.arange(1, len(log_probs)), emitted[1:]))
    last = jnp.take_along_axis(alpha, 2 * labels[:, None], 1)[:, 0]
    before = jnp.take_along_axis(alpha, jnp.maximum(2 * labels[:, None] - 1, 0), 1)[:, 0]
    loss = -jnp.logaddexp(last, jnp.where(labels > 0, before, _NEVER))
    return jnp.where(loss > -_NEVER / 2, jnp.inf, loss) + _of_normalized(log_probs, steps)


def _of_normalized(log_probs: jax.Array, steps: jax.Array) -> Any:
    """Return 0 with the gradient that PyTorch adds: it takes the input to be normalized (`LossCTC.cpp`)."""
    valid = (jnp.arange(len(log_probs))[:, None] < steps)[..., None]
    total = jnp.where(valid, jnp.exp(log_probs), 0).sum((0, 2))
    return total - lax.stop_gradient(total)


def _shifted(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (count, 0)), constant_values=_NEVER)[:, : x.shape[1]]
