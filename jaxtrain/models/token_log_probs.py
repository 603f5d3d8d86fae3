"""Log-probabilities of tokens under a decoder, without its logits."""

from typing import Any

import jax

from jaxtrain.losses import chunked_cross_entropy


def log_probs(
    model: Any,
    tokens: jax.Array,
    targets: jax.Array,
    rng: jax.Array | None = None,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
) -> jax.Array:
    """Compute the log-probability of every target, with the logits of a chunk of tokens at a time.

    `functional(model, log_probs)` is a pure function of the parameters. The sum over the tokens of an answer is its
    log-probability, as `jaxtrain.losses.dpo` takes it.

    Args:
      model: Decoder with `hidden` and `projection`, such as `GPT2` or `Llama`.
      tokens: int [B, T].
      targets: int [B, T], the tokens that follow.
      rng: Dropout key for training mode, or None.
      positions: As of the model.
      segments: As of the model.
      chunk: Maximum number of tokens whose logits exist at a time.
      ignore_index: Target whose log-probability is 0.

    Returns:
      float [B, T].

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxtrain.models import GPT2, GPT2Config, functional
      >>> model = GPT2(GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2), rngs=nnx.Rngs(0))
      >>> compute, params = functional(model, log_probs)
      >>> compute(params, jnp.ones((2, 5), int), jnp.ones((2, 5), int)).shape
      (2, 5)
    """
    hidden = model.hidden(tokens, rng, positions, segments)
    return -chunked_cross_entropy(hidden, model.projection, targets, chunk=chunk, ignore_index=ignore_index)
