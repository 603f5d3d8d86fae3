"""Cross-entropy over a large vocabulary without storing all logits.

The logits of a language model, [tokens, vocabulary], are its largest array, and so is their gradient. Here the
projection and the loss are one function, computed for a chunk of tokens at a time. The backward pass recomputes each
chunk's logits: 8 instead of 6 · tokens · width · vocabulary operations. Computing gradients in the forward pass would
save these, but it does not know the loss scale, without which float16 gradients underflow. The function is an ordinary
rematerialized scan, which can be differentiated twice and autocast.
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
    """Compute `cross_entropy(hidden @ projection, labels)` for a chunk of tokens at a time.

    Args:
      hidden: float[..., width].
      projection: float[width, vocabulary].
      labels: int[...].
      chunk: Maximum number of tokens whose logits exist at a time.
      ignore_index: Label whose loss is 0.
      label_smoothing: As for `cross_entropy`.

    Returns:
      float[...].

    Raises:
      UserError: As for `cross_entropy`, or `chunk` is below 1.

    Example:
      >>> hidden, projection, labels = jnp.ones((2, 5, 3)), jnp.eye(3), jnp.zeros((2, 5), int)
      >>> chunked = chunked_cross_entropy(hidden, projection, labels, chunk=4)
      >>> bool(jnp.allclose(chunked, cross_entropy(hidden @ projection, labels)))
      True
    """
    if chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    if labels.shape != hidden.shape[:-1]:
        raise UserError(
            f"labels must be {list(hidden.shape[:-1])} for hidden {list(hidden.shape)}, got {list(labels.shape)}"
        )
    size = min(chunk, max(labels.size, 1))
    n = -(-labels.size // size)

    def chunks(x: jax.Array, fill: int) -> jax.Array:
        padded = jnp.pad(x, [(0, n * size - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        # A chunk takes every n-th token, so that tokens sharded over devices are not moved.
        return padded.reshape(size, n, *x.shape[1:]).swapaxes(0, 1)

    @jax.checkpoint
    def chunk_losses(hidden: jax.Array, projection: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(hidden @ projection, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)

    _, losses = lax.scan(
        lambda _, at: (None, chunk_losses(at[0], projection, at[1])),
        None,
        (chunks(hidden.reshape(-1, hidden.shape[-1]), 0), chunks(labels.reshape(-1), ignore_index)),
    )
    return losses.swapaxes(0, 1).reshape(-1)[: labels.size].reshape(labels.shape)
