"""The labels of a T5, from which its decoder's inputs follow."""

import jax
import jax.numpy as jnp

from jaxtrain.models.t5.t5_config import T5Config

IGNORE_INDEX = -100
"""Label of positions without a target, as in `torch.nn.functional.cross_entropy`."""


def shift_right(labels: jax.Array, config: T5Config) -> jax.Array:
    """Return the decoder inputs for `labels`: the start token, then every label but the last.

    Args:
      labels: int [B, T], `IGNORE_INDEX` at positions without a target.
      config: Source of the start token and of the padding token, which replaces `IGNORE_INDEX`.

    Returns:
      Tokens int [B, T].

    Example:
      >>> shift_right(jnp.array([[5, 6, 1, -100, -100]]), T5Config()).tolist()
      [[0, 5, 6, 1, 0]]
    """
    start = jnp.full_like(labels[:, :1], config.decoder_start_token_id)
    shifted = jnp.concatenate([start, labels[:, :-1]], axis=1)
    return jnp.where(shifted == IGNORE_INDEX, config.pad_token_id, shifted)
