"""The loss of supervised fine-tuning: tokens of answers alone, of sequences with weights."""

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.losses.shapes import require_alike
from jaxtrain.step import Loss


def supervised(
    losses: jax.Array,
    weight: jax.Array,
    *,
    segments: jax.Array | None = None,
    sequence_weights: jax.Array | None = None,
) -> Loss:
    """Sum the losses of tokens, those of each sequence with its weight: Σ wₛ lₛₜ over Σ wₛ.

    Args:
      losses: float[B, T], loss of each token.
      weight: float or bool[B, T], 1 where the token is in the loss and 0 elsewhere.
      segments: int[B, T], number of the sequence of each token in its row, from 1; None for one sequence a row.
      sequence_weights: float[B, S], weight of each sequence of a row; None for 1.

    Returns:
      The loss, whose weight is the sum of the tokens' weights.

    Raises:
      UserError: The shapes do not fit.

    Example:
      >>> losses = jnp.array([[1.0, 2.0, 4.0, 8.0]])
      >>> weight, segments = jnp.array([[0, 1, 1, 1]]), jnp.array([[1, 1, 2, 2]])
      >>> loss = supervised(losses, weight, segments=segments, sequence_weights=jnp.array([[1.0, 0.5]]))
      >>> float(loss.total), float(loss.weight)
      (8.0, 2.0)
    """
    require_alike(losses=losses, weight=weight)
    if sequence_weights is None:
        return Loss.of(losses, weight)
    if sequence_weights.ndim != 2 or len(sequence_weights) != len(losses):
        raise UserError(
            f"sequence_weights must be [{len(losses)}, sequences] for losses {list(losses.shape)}, got "
            f"{list(sequence_weights.shape)}"
        )
    numbers = jnp.ones(losses.shape, int) if segments is None else segments
    of_tokens = jnp.take_along_axis(sequence_weights, jnp.maximum(numbers - 1, 0), axis=1, mode="clip")
    return Loss.of(losses, weight.astype(of_tokens.dtype) * of_tokens)
