"""Texts from a decoder: the prompts are read once, then every token is computed from the last and the cache.

For any model called as `jaxtrain.models.llama.Llama`, with an `empty_cache`. Everything runs in one compiled program,
whose shapes are those of the prompts and of the longest text; what is chosen is what `transformers.generate` chooses.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.models.decoder import KVCache


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
    pad: int = 0,
    seed: int = 0,
) -> jax.Array:
    """What follows the prompts int [B, T]: tokens int32 [B, new_tokens]; behind a first `stop`, `pad`.

    `params` are `model`'s, as `jaxtrain.models.functional` returns them; of `model` only the structure is used, so
    that `nnx.eval_shape` is enough of one. Prompts shorter than others are padded on the left, where `mask` bool
    [B, T] is False. Raises `UserError` for a mask that is not of that kind, and for prompts too long for the model.
    """
    tokens = np.asarray(prompts, np.int32)
    real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    _check(tokens, real, new_tokens)
    graphdef, _ = nnx.split(model)
    return _generated(graphdef, params, tokens, real, jax.random.key(seed), new_tokens, sampling, stop, pad)


def _check(tokens: np.ndarray, real: np.ndarray, new_tokens: int) -> None:
    if tokens.ndim != 2 or tokens.size == 0:
        raise UserError(f"prompts of shape {list(tokens.shape)} are no rows of tokens: give [rows, tokens], 1 or more")
    if real.shape != tokens.shape:
        raise UserError(
            f"the mask {list(real.shape)} is not of the shape of the prompts, {list(tokens.shape)}: make it"
        )
    if (real[:, :-1] & ~real[:, 1:]).any() or not real[:, -1].all():
        row = int(((real[:, :-1] & ~real[:, 1:]).any(axis=1) | ~real[:, -1]).argmax())
        raise UserError(f"prompt {row} is not padded on the left only: move its tokens to the end of the row")
    if new_tokens < 1:
        raise UserError(f"{new_tokens} new tokens are none: ask for 1 or more")


@partial(jax.jit, static_argnums=(0, 5, 6, 7, 8))
def _generated(
    graphdef: Any,
    params: Any,
    prompts: jax.Array,
    real: jax.Array,
    rng: jax.Array,
    new_tokens: int,
    sampling: Sampling,
    stop: int | None,
    pad: int,
) -> jax.Array:
    model: Any = nnx.merge(graphdef, params)
    rows, length = prompts.shape
    lengths = real.sum(axis=1, dtype=np.int32)
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=np.int32) - 1, 0)
    cache = model.empty_cache(rows, length + new_tokens - 1)
    logits, cache = model(prompts, None, positions, real.astype(np.int32), cache)

    def chosen(i: jax.Array, logits: jax.Array, running: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jnp.where(running, sampling.choose(logits[:, -1], jax.random.fold_in(rng, i)), pad)
        return token, running if stop is None else running & (token != stop)

    def going_on(state: tuple[Any, ...]) -> jax.Array:
        i, _, running, _ = state
        return (i < new_tokens) & running.any()

    def step(state: tuple[jax.Array, jax.Array, jax.Array, KVCache]) -> tuple[Any, ...]:
        i, text, running, cache = state
        last = lax.dynamic_slice_in_dim(text, i - 1, 1, axis=1)
        logits, cache = model(last, None, (lengths + i - 1)[:, None], None, cache)
        token, running = chosen(i, logits, running)
        return i + 1, lax.dynamic_update_slice_in_dim(text, token[:, None], i, axis=1), running, cache

    token, running = chosen(jnp.zeros([], np.int32), logits, jnp.ones(rows, bool))
    text = jnp.full((rows, new_tokens), pad, np.int32).at[:, 0].set(token)
    _, text, _, _ = lax.while_loop(going_on, step, (jnp.ones([], np.int32), text, running, cache))
    return text
