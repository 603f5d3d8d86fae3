"""Texts of an imported language model, which has no cache: every token is computed from the whole text."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.models import Sampling

Logits = Callable[[Any, jax.Array], jax.Array]
"""(params, tokens int [B, T]) → logits [B, T, vocabulary], of tokens that do not depend on later ones."""

_BLOCK = 64
"""The width of a text that is streamed is a multiple of this number, or the context."""


class Options(NamedTuple):
    """What a compiled program is specialized to.

    Attributes:
      new_tokens: Number of tokens to generate for every row.
      sampling: Rule by which tokens are chosen.
      stop: Token that ends a text; None for none.
      pad: Token that follows `stop`.
    """

    new_tokens: int
    sampling: Sampling
    stop: int | None
    pad: int


def generate(
    logits: Logits, params: Any, prompts: np.ndarray, mask: np.ndarray, options: Options, seed: int = 0
) -> jax.Array:
    """Generate a continuation of every prompt in one compiled program, as `jaxtrain.models.generate`.

    Args:
      logits: Function of the parameters and of tokens.
      params: Its parameters.
      prompts: Tokens int [B, T].
      mask: bool [B, T], False at padding on the left.
      options: How texts are generated.
      seed: Seed of the draws.

    Returns:
      Tokens int32 [B, new_tokens].
    """
    lengths = mask.sum(1).astype(np.int32)
    text = np.full((len(prompts), prompts.shape[1] + options.new_tokens), options.pad, np.int32)
    for row, length in enumerate(lengths):
        text[row, :length] = prompts[row, prompts.shape[1] - length :]
    return _generate(logits, params, text, lengths, jax.random.key(seed), options)


@partial(jax.jit, static_argnums=(0, 5))
def _generate(
    logits: Logits, params: Any, text: jax.Array, lengths: jax.Array, rng: jax.Array, options: Options
) -> jax.Array:
    rows = jnp.arange(len(text))

    def condition(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, _, unfinished = state
        return (i < options.new_tokens) & unfinished.any()

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, text, unfinished = state
        last = logits(params, text)[rows, lengths + i - 1]
        token = jnp.where(unfinished, options.sampling.choose(last, jax.random.fold_in(rng, i)), options.pad)
        is_open = unfinished if options.stop is None else unfinished & (token != options.stop)
        return i + 1, text.at[rows, lengths + i].set(token), is_open

    start = jnp.zeros([], np.int32), text, jnp.ones(len(text), bool)
    _, text, _ = lax.while_loop(condition, step, start)
    return jnp.take_along_axis(text, lengths[:, None] + jnp.arange(options.new_tokens)[None], axis=1)


def stream(
    logits: Logits, params: Any, prompt: Sequence[int], context: int, options: Options, seed: int
) -> Iterator[int]:
    """Generate a continuation of one prompt of any length and yield its tokens as they are computed.

    Beyond the context, a token is computed from at least the last half of it.

    Args:
      logits: Function of the parameters and of tokens.
      params: Its parameters.
      prompt: Tokens, at least one.
      context: Largest number of tokens that a token is computed from.
      options: How the text is generated.
      seed: Seed of the draws.
    """
    width = min(-(-(len(prompt) + options.new_tokens) // _BLOCK) * _BLOCK, context)
    recent, key = list(prompt)[-width:], jax.random.key(seed)
    for i in range(options.new_tokens):
        if len(recent) > width:
            recent = recent[-max(width // 2, 1) :]
        text = np.full((1, width), options.pad, np.int32)
        text[0, : len(recent)] = recent
        token = _next(logits, params, text, np.int32(len(recent)), jax.random.fold_in(key, i), options.sampling)
        recent.append(int(token))
        yield recent[-1]
        if recent[-1] == options.stop:
            return


@partial(jax.jit, static_argnums=(0, 5))
def _next(
    logits: Logits, params: Any, text: jax.Array, length: jax.Array, rng: jax.Array, sampling: Sampling
) -> jax.Array:
    """Return the token that follows the first `length` tokens of a text [1, T]."""
    return sampling.choose(logits(params, text)[:, length - 1], rng)[0]
