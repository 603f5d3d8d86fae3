"""Cross-entropy of a large vocabulary, without ever holding its logits.

Logits are the largest array of a language model: [tokens, vocabulary], and again for their gradient. Here the
projection to them and the loss are one function, computed for some tokens at a time. The backward pass computes each
chunk's logits again: 8 instead of 6 · tokens · width · vocabulary operations. Computing gradients in the forward pass
would save these, but only of a sum, whose scale it would have to guess: float16 gradients are only saved from underflow
by the loss scale, which is known when they are asked for. What is left is rematerialisation, so it is said as that, and
differentiates, twice too, and autocasts like any other code.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.losses.classification import cross_entropy


def chunked_cross_entropy(
    hidden: jax.Array,
    projection: jax.Array,
    labels: jax.Array,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """`cross_entropy(hidden @ projection, labels)`: hidden [..., width], projection [width, vocabulary], integer
    labels [...] → [...], with logits of at most `chunk` tokens held at a time.

    Labels and options are those of `cross_entropy`, and so are the errors; `UserError` for a chunk under 1 too.

    >>> hidden, projection, labels = jnp.ones((2, 5, 3)), jnp.eye(3), jnp.zeros((2, 5), int)
    >>> chunked = chunked_cross_entropy(hidden, projection, labels, chunk=4)
    >>> bool(jnp.allclose(chunked, cross_entropy(hidden @ projection, labels)))
    True
    """
    if chunk < 1:
        raise UserError(f"chunk {chunk} holds no token: make it 1 or more")
    if labels.shape != hidden.shape[:-1]:
        raise UserError(
            f"the loss was given hidden {list(hidden.shape)} and labels {list(labels.shape)}: "
            f"give it labels {list(hidden.shape[:-1])}"
        )
    size = min(chunk, max(labels.size, 1))
    n = -(-labels.size // size)

    def chunks(x: jax.Array, fill: int) -> jax.Array:
        padded = jnp.pad(x, [(0, n * size - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        # Every n-th token to a chunk, so that tokens sharded over devices stay where they are.
        return padded.reshape(size, n, *x.shape[1:]).swapaxes(0, 1)

    @jax.checkpoint
    def losses_of(hidden: jax.Array, projection: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(hidden @ projection, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)

    _, losses = lax.scan(
        lambda _, at: (None, losses_of(at[0], projection, at[1])),
        None,
        (chunks(hidden.reshape(-1, hidden.shape[-1]), 0), chunks(labels.reshape(-1), ignore_index)),
    )
    return losses.swapaxes(0, 1).reshape(-1)[: labels.size].reshape(labels.shape)
