"""The loss of supervised fine-tuning: tokens of answers alone, of sequences with weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.losses.shapes import require_alike
from jaxtrain.step import Loss


def supervised(
    losses: jax.Array,
    weight: jax.Array,
    *,
    segments: jax.Array | None = None,
    sequence_weights: jax.Array | None = None,
    per_sequence: bool = False,
) -> Loss:
    """Sum the losses of tokens, those of each sequence with its weight: Σ wₛ lₛₜ over Σ wₛ.

    By default every token counts the same, as in TRL's SFTTrainer: long answers have a larger part in the loss. With
    `per_sequence` every sequence does, whatever its length: its loss is the mean over its tokens.

    Args:
      losses: float[B, T], loss of each token.
      weight: float or bool[B, T], weight of each token, 0 where it is not in the loss.
      segments: int[B, T], number of the sequence of each token in its row, from 1; None for one sequence a row.
      sequence_weights: float[B, S], weight of each sequence of a row, which those of its tokens are multiplied by; None
        for 1.
      per_sequence: Whether the weights of tokens are divided by the number of tokens of their sequence in the loss.

    Returns:
      The loss, whose weight is the sum of the tokens' weights: micro-batches add up to the loss of all their sequences.

    Raises:
      UserError: The shapes do not fit.

    Example:
      >>> losses = jnp.array([[1.0, 2.0, 4.0, 8.0]])
      >>> weight, segments = jnp.array([[0, 1, 1, 1]]), jnp.array([[1, 1, 2, 2]])
      >>> loss = supervised(losses, weight, segments=segments, sequence_weights=jnp.array([[1.0, 0.5]]))
      >>> float(loss.total), float(loss.weight)
      (8.0, 2.0)
      >>> loss = supervised(losses, weight, segments=segments, per_sequence=True)
      >>> float(loss.total), float(loss.weight)
      (8.0, 2.0)
    """
    require_alike(losses=losses, weight=weight)
    if segments is not None:
        require_alike(losses=losses, segments=segments)
    numbers = jnp.ones(losses.shape, int) if segments is None else segments
    if sequence_weights is not None:
        if sequence_weights.ndim != 2 or len(sequence_weights) != len(losses):
            raise UserError(
                f"sequence_weights must be [{len(losses)}, sequences] for losses {list(losses.shape)}, got "
                f"{list(sequence_weights.shape)}"
            )
        of_tokens = jnp.take_along_axis(sequence_weights, jnp.maximum(numbers - 1, 0), axis=1, mode="clip")
        weight = weight.astype(of_tokens.dtype) * of_tokens
    if per_sequence:
        weight = weight.astype(np.promote_types(losses.dtype, np.float32))
        weight = weight / jnp.maximum(_tokens_in_loss(weight, numbers), 1)
    return Loss.of(losses, weight)


def _tokens_in_loss(weight: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return for each token how many of its sequence are in the loss, float[B, T]."""
    # The number of a sequence is at most that of its tokens.
    count = jax.vmap(partial(jax.ops.segment_sum, num_segments=weight.shape[1] + 1))
    return jnp.take_along_axis(count((weight != 0).astype(weight.dtype), numbers), numbers, axis=1, mode="clip")
