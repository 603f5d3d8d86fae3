"""A decoder with a linear head on the last token: a classifier of sequences, or with one output a reward model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class SequenceClassifier(nnx.Module):
    """Classifier as `transformers`' models for sequence classification: the last token's hidden state by a kernel.

    Called as `model(tokens, rng, positions, segments)` it returns logits [B, labels], of the last token in each row
    whose segment is not 0; without segments, of the last token. One label is a reward, for
    `jaxtrain.losses.bradley_terry`.

    Args:
      decoder: Decoder with `hidden` and `projection`, such as `GPT2` or `Llama`. Its parameters are at "decoder/…".
      labels: Number of outputs.
      initializer_range: Standard deviation of the initial kernel, "score" [width, labels].

    Example:
      >>> from jaxtrain.models import GPT2, GPT2Config, functional
      >>> decoder = GPT2(GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2), rngs=nnx.Rngs(0))
      >>> apply, params = functional(SequenceClassifier(decoder, 3, rngs=nnx.Rngs(1)))
      >>> apply(params, jnp.ones((2, 5), int)).shape
      (2, 3)
    """

    def __init__(self, decoder: Any, labels: int, *, rngs: nnx.Rngs, initializer_range: float = 0.02) -> None:
        width = decoder.projection.shape[0]
        self.decoder = decoder
        self.score = nnx.Param(nnx.initializers.normal(initializer_range)(rngs.params(), (width, labels)))

    def __call__(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        hidden = self.decoder.hidden(tokens, rng, positions, segments)
        return last_token(hidden, segments) @ self.score[...]


def last_token(hidden: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Return the hidden state [B, width] of the last token in each row whose segment is not 0.

    Example:
      >>> hidden = jnp.arange(4.0).reshape(1, 4, 1)
      >>> float(last_token(hidden, jnp.array([[1, 1, 1, 0]]))[0, 0])
      2.0
    """
    if segments is None:
        return hidden[:, -1]
    last = segments.shape[1] - 1 - jnp.argmax(segments[:, ::-1] > 0, axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
