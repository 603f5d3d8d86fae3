"""Losses an example, to be summed into a `jaxtrain.Loss`."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats: logits [..., classes], integer labels [...] → [...].

    `torch.nn.functional.cross_entropy(reduction="none")`, with the classes on the last axis.

    >>> round(float(cross_entropy(jnp.zeros(10), jnp.int32(3))), 4)
    2.3026
    """
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
