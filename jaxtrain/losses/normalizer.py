"""The logarithm of the sum of exponentials, in one pass over the scores on a GPU.

The largest score is found before the exponentials are summed, which reads the scores twice. Where the logits of a
vocabulary are larger than all activations of the model, this is a large part of a step's memory traffic. A reduction of
pairs (largest score, sum of exponentials relative to it) reads them once (Milakov and Gimelshein 2018).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Pair = tuple[jax.Array, jax.Array]


def log_normalizer(scores: jax.Array) -> Pair:
    """Return the largest score and log Σ exp(score − largest), over the last axis.

    The largest has no gradient. Scores that are NaN or infinite make the logarithm NaN, but for -inf beside a finite
    score.

    >>> largest, normalizer = log_normalizer(jnp.array([1.0, 1.0]))
    >>> float(largest), round(float(normalizer), 4)
    (1.0, 0.6931)
    """
    constant = lax.stop_gradient(scores)
    largest, total = lax.platform_dependent(constant, cuda=one_pass, rocm=one_pass, default=_two_passes)
    return largest, jnp.log(_differentiable_total(scores, largest, total))


def one_pass(scores: jax.Array) -> Pair:
    """Return the largest score and the sum of exponentials relative to it, reduced as pairs."""
    starts = jnp.array(-jnp.inf, scores.dtype), jnp.array(0, scores.dtype)
    largest, total = lax.reduce((scores, jnp.ones_like(scores)), starts, _combine, (scores.ndim - 1,))
    return largest, total + (largest - largest)  # NaN for an infinite score


def _combine(a: Any, b: Any) -> Pair:
    (largest_a, total_a), (largest_b, total_b) = a, b
    # Equal ones may be infinite, where their difference is NaN.
    smaller = jnp.where(largest_a == largest_b, 1, jnp.exp(-jnp.abs(largest_a - largest_b)))
    total = jnp.where(largest_a > largest_b, total_a + total_b * smaller, total_a * smaller + total_b)
    return jnp.maximum(largest_a, largest_b), total


def _two_passes(scores: jax.Array) -> Pair:
    largest = scores.max(-1)
    return largest, jnp.exp(scores - largest[..., None]).sum(-1)


@jax.custom_jvp
def _differentiable_total(scores: jax.Array, largest: jax.Array, total: jax.Array) -> jax.Array:
    del scores, largest
    return total


@_differentiable_total.defjvp
def _differentiable_total_jvp(primals: Any, tangents: Any) -> Pair:
    scores, largest, _ = primals
    return _differentiable_total(*primals), (jnp.exp(scores - largest[..., None]) * tangents[0]).sum(-1)
