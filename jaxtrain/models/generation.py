"""Texts from a decoder: what it is given is read once, then every token is computed from the last and the cache.

For any model called as `jaxtrain.models.llama.Llama`, with an `empty_cache`, which goes on from prompts; and for
`jaxtrain.models.t5.T5`, which answers to sources. Everything runs in one compiled program, whose shapes are those of
the prompts and of the longest text; what is chosen is what `transformers.generate` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.models.t5 import T5

GoOn = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(the last token [B, 1], how many there are, what is remembered) → (its logits [B, 1, vocabulary], what is then)."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits: at `temperature` 0 the likeliest, at others drawn.

    Drawn from the `top_k` likeliest, and of these from the fewest whose probabilities reach `top_p`; None: from all.
    Ties are kept by `top_k`, as in `transformers`. Raises `UserError` for values that choose nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} is negative: choose 0 for the likeliest token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} leaves no token to draw: make it 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is no probability to reach: choose one above 0, at most 1")

    def scores(self, logits: jax.Array) -> jax.Array:
        """The logits [B, vocabulary] to draw with: over the temperature, −∞ where not to be drawn.

        >>> Sampling(temperature=0.5, top_k=2).scores(jnp.array([[1.0, 3.0, 2.0]])).tolist()
        [[-inf, 6.0, 4.0]]
        """
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            order = jnp.argsort(logits, axis=-1)
            less_likely = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1), axis=-1)
            # The likeliest is drawn from whatever it alone reaches.
            dropped = (less_likely <= 1 - self.top_p).at[..., -1].set(False)
            dropped = jnp.take_along_axis(dropped, jnp.argsort(order, axis=-1), -1)
            logits = jnp.where(dropped, -jnp.inf, logits)
        return logits

    def choose(self, logits: jax.Array, rng: jax.Array) -> jax.Array:
        """Tokens int32 [B] for logits [B, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(axis=-1).astype(np.int32)
        return jax.random.categorical(rng, self.scores(logits)).astype(np.int32)


GREEDY = Sampling()


def generate(
    model: nnx.Module,
    params: Any,
    prompts: Any,
    new_tokens: int,
    *,
    mask: Any = None,
    sampling: Sampling = GREEDY,
    stop: int | None = None,
    min_new_tokens: int = 0,
    pad: int = 0,
    seed: int = 0,
) -> jax.Array:
    """What follows the prompts int [B, T]: tokens int32 [B, new_tokens]; behind a first `stop`, `pad`.

    `params` are `model`'s, as `jaxtrain.models.functional` returns them; of `model` only the structure is used, so
    that `nnx.eval_shape` is enough of one. Prompts shorter than others are padded where `mask` bool [B, T] is False:
    on the left, but for a T5, whose prompts are its encoder's; there the text is the decoder's, behind its start.
    Before `min_new_tokens` are written, `stop` is not chosen. Raises `UserError` for a mask that is not of that kind,
    and for prompts too long for the model.
    """
    tokens = np.asarray(prompts, np.int32)
    real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    _check(tokens, real, new_tokens)
    if not isinstance(model, T5):
        _check_padding(real)
    graphdef, _ = nnx.split(model)
    key, ending = jax.random.key(seed), Ending(stop, min_new_tokens, pad)
    return _generated(graphdef, params, tokens, real, key, new_tokens, sampling, ending)


class Ending(NamedTuple):
    """The token that ends a text, how many come before it at least, and what stands behind it."""

    stop: int | None
    min_new_tokens: int
    pad: int


def _check(tokens: np.ndarray, real: np.ndarray, new_tokens: int) -> None:
    if tokens.ndim != 2 or tokens.size == 0:
        raise UserError(f"prompts of shape {list(tokens.shape)} are no rows of tokens: give [rows, tokens], 1 or more")
    if real.shape != tokens.shape:
        raise UserError(
            f"the mask {list(real.shape)} is not of the shape of the prompts, {list(tokens.shape)}: make it"
        )
    if new_tokens < 1:
        raise UserError(f"{new_tokens} new tokens are none: ask for 1 or more")


def _check_padding(real: np.ndarray) -> None:
    if (real[:, :-1] & ~real[:, 1:]).any() or not real[:, -1].all():
        row = int(((real[:, :-1] & ~real[:, 1:]).any(axis=1) | ~real[:, -1]).argmax())
        raise UserError(f"prompt {row} is not padded on the left only: move its tokens to the end of the row")


@partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generated(
    graphdef: Any,
    params: Any,
    prompts: jax.Array,
    real: jax.Array,
    rng: jax.Array,
    new_tokens: int,
    sampling: Sampling,
    ending: Ending,
) -> jax.Array:
    model: Any = nnx.merge(graphdef, params)
    begin = _answering if isinstance(model, T5) else _continuing
    logits, memory, go_on = begin(model, prompts, real, new_tokens)
    stop, min_new_tokens, pad = ending

    def chosen(i: jax.Array, logits: jax.Array, running: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits[:, -1]
        if stop is not None and min_new_tokens:
            logits = jnp.where(i < min_new_tokens, logits.at[:, stop].set(-jnp.inf), logits)
        token = jnp.where(running, sampling.choose(logits, jax.random.fold_in(rng, i)), pad)
        return token, running if stop is None else running & (token != stop)

    def going_on(state: tuple[Any, ...]) -> jax.Array:
        i, _, running, _ = state
        return (i < new_tokens) & running.any()

    def step(state: tuple[jax.Array, jax.Array, jax.Array, Any]) -> tuple[Any, ...]:
        i, text, running, memory = state
        logits, memory = go_on(lax.dynamic_slice_in_dim(text, i - 1, 1, axis=1), i, memory)
        token, running = chosen(i, logits, running)
        return i + 1, lax.dynamic_update_slice_in_dim(text, token[:, None], i, axis=1), running, memory

    token, running = chosen(jnp.zeros([], np.int32), logits, jnp.ones(len(prompts), bool))
    text = jnp.full((len(prompts), new_tokens), pad, np.int32).at[:, 0].set(token)
    _, text, _, _ = lax.while_loop(going_on, step, (jnp.ones([], np.int32), text, running, memory))
    return text


def _continuing(model: Any, prompts: jax.Array, real: jax.Array, new_tokens: int) -> tuple[jax.Array, Any, GoOn]:
    """The logits behind the prompts, the cache that holds them, and how it goes on."""
    rows, length = prompts.shape
    lengths = real.sum(axis=1, dtype=np.int32)
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=np.int32) - 1, 0)
    cache = model.empty_cache(rows, length + new_tokens - 1)
    logits, cache = model(prompts, None, positions, real.astype(np.int32), cache)

    def go_on(last: jax.Array, written: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return model(last, None, (lengths + written - 1)[:, None], None, cache)

    return logits, cache, go_on


def _answering(model: T5, sources: jax.Array, real: jax.Array, new_tokens: int) -> tuple[jax.Array, Any, GoOn]:
    """The logits behind the decoder's start, what it remembers of the sources, and how it goes on."""
    memory = model.remember(model.encode(sources, real), real, new_tokens)
    start = jnp.full((len(sources), 1), model.config.decoder_start_token_id, np.int32)
    logits, memory = model.go_on(start, memory)
    return logits, memory, lambda last, written, memory: model.go_on(last, memory)
