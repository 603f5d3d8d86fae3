"""Inputs of masked language modeling (Devlin et al. 2018)."""

import jax
import jax.numpy as jnp

MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that are replaced by the mask token and by a random token; the rest is unchanged."""


def mask_tokens(
    rng: jax.Array, tokens: jax.Array, maskable: jax.Array, *, mask: int, vocabulary: int, share: float
) -> tuple[jax.Array, jax.Array]:
    """Choose the tokens to predict and mask them as BERT does.

    Of the tokens to predict, 80 % are replaced by the mask token and 10 % by a random token; 10 % stay unchanged, so
    that the model cannot know which of its input tokens are correct.

    Args:
      rng: Key of the draws.
      tokens: int [T].
      maskable: bool [T], False for special tokens.
      mask: The mask token.
      vocabulary: Number of tokens to draw random ones from.
      share: Probability that a token is to be predicted.

    Returns:
      A tuple (input tokens int [T], bool [T] where to predict).
    """
    choice_rng, action_rng, random_rng = jax.random.split(rng, 3)
    predicted = (jax.random.uniform(choice_rng, tokens.shape) < share) & maskable
    action = jax.random.uniform(action_rng, tokens.shape)
    random_tokens = jax.random.randint(random_rng, tokens.shape, 0, vocabulary, tokens.dtype)
    replaced = jnp.where(action < MASKED, jnp.full_like(tokens, mask), random_tokens)
    return jnp.where(predicted & (action < MASKED + RANDOM), replaced, tokens), predicted
