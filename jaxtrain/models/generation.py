"""Autoregressive generation with a key-value cache.

`generate` writes a batch of texts in one compiled program; `stream` yields the tokens of one text as they are
computed. Both read the prompt once, without the logits of its tokens but the last, then compute every token from the
last one and the cache, and choose tokens as `transformers.generate` does. The cache grows in stages, because a token is
computed from all of its slots. They take any decoder with the methods of `jaxtrain.models.llama.Llama`; `generate`
takes a `jaxtrain.models.t5.T5` as well, whose prompts are its encoder's inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.models.layers.decoder import KVCache
from jaxtrain.models.parameter_forms import accepts_forms
from jaxtrain.models.t5 import T5
from jaxtrain.models.t5.t5_model import DecoderCache

DecodeStep = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(last token int32 [B, 1], number of tokens written int32 [], cache) → (logits [B, 1, vocabulary], cache)."""


@dataclass(frozen=True)
class Sampling:
    """Rule by which a token is chosen from its logits, as the samplers of `transformers`.

    Tokens are drawn from the `top_k` most likely ones (ties at the edge included), and of these from the smallest set
    whose probabilities add up to `top_p`.

    Args:
      temperature: Divisor of the logits; 0 chooses the most likely token.
      top_k: Number of most likely tokens to draw from; None for all.
      top_p: Probability mass to draw from, in (0, 1]; None for all.

    Raises:
      UserError: A value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature must be at least 0, got {self.temperature}: use 0 for the most likely token")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}: use None to draw from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}: use None to draw from all tokens")

    def scores(self, logits: jax.Array) -> jax.Array:
        """Return the logits to draw with: divided by the temperature, −∞ for excluded tokens.

        Args:
          logits: Floating [B, vocabulary].

        Returns:
          Scores of the same shape and dtype.

        Example:
          >>> Sampling(temperature=0.5, top_k=2).scores(jnp.array([[1.0, 3.0, 2.0]])).tolist()
          [[-inf, 6.0, 4.0]]
        """
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            threshold = lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < threshold, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            order = jnp.argsort(logits, axis=-1)
            cumulative = jnp.cumsum(jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1), axis=-1)
            # The most likely token always stays.
            excluded = (cumulative <= 1 - self.top_p).at[..., -1].set(False)
            excluded = jnp.take_along_axis(excluded, jnp.argsort(order, axis=-1), -1)
            logits = jnp.where(excluded, -jnp.inf, logits)
        return logits

    def choose(self, logits: jax.Array, rng: jax.Array) -> jax.Array:
        """Return tokens int32 [B] for logits [B, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(axis=-1).astype(np.int32)
        # In float32 at least, as `transformers` does.
        logits = logits.astype(np.promote_types(logits.dtype, np.float32))
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
    """Generate a continuation of every prompt, as `transformers.generate`, in one compiled program.

    For a `T5`, prompts are the encoder's inputs and the text is the decoder's, after its start token.

    Args:
      model: Decoder or `T5`. Only its structure is used, so the result of `nnx.eval_shape` will do.
      params: Parameters of `model`, as `jaxtrain.models.functional` returns them; with adapters, those that
        `jaxtrain.models.lora.adapted` returns.
      prompts: Tokens int [B, T].
      new_tokens: Number of tokens to generate for every row.
      mask: bool [B, T], False at padding. Decoders take padding on the left only; a `T5` takes it anywhere.
      sampling: Rule by which tokens are chosen.
      stop: Token that ends a text; None generates `new_tokens` always.
      min_new_tokens: Number of tokens before which `stop` is not chosen.
      pad: Token that follows `stop`.
      seed: Seed of the draws.

    Returns:
      Tokens int32 [B, new_tokens], without the prompts.

    Raises:
      UserError: The mask does not have the shape of the prompts or pads a decoder's prompt elsewhere than on the
        left, or a text exceeds the positions of the model.
    """
    tokens = np.asarray(prompts, np.int32)
    real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
    _check_prompts(tokens, real)
    _check_new_tokens(new_tokens)
    if not isinstance(model, T5):
        _check_left_padding(real)
    graphdef, _ = nnx.split(model)
    options = _Options(new_tokens, sampling, stop, min_new_tokens, pad)
    return _generate(graphdef, params, tokens, None if real.all() else real, jax.random.key(seed), options)


def stream(
    model: nnx.Module,
    params: Any,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    context: int | None = None,
    sampling: Sampling = GREEDY,
    stop: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Generate a continuation of one prompt of any length and yield its tokens as they are computed.

    As long as prompt and text fit into the context, the tokens are those of `generate`. Beyond it, the cache is filled
    again from the last half of the context whenever it is full, so that every token is computed from at least that
    many. Programs are compiled for caches of a few sizes, each half as large again as the one before.

    Args:
      model: Decoder. Only its structure is used, so the result of `nnx.eval_shape` will do.
      params: Parameters of `model`, as `jaxtrain.models.functional` returns them; with adapters, those that
        `jaxtrain.models.lora.adapted` returns.
      prompt: Tokens, at least one. Of a prompt longer than the context the end is used.
      new_tokens: Number of tokens to generate.
      context: Largest number of tokens that a token is computed from; None for `model.context_length`.
      sampling: Rule by which tokens are chosen.
      stop: Token that ends the text, yielded last; None generates `new_tokens` always.
      seed: Seed of the draws.

    Returns:
      An iterator of tokens.

    Raises:
      UserError: The prompt is empty, `new_tokens` or `context` is not positive, `context` exceeds the positions of
        the model, or the model is a `T5`.
    """
    tokens = np.asarray(prompt, np.int32)[None]
    _check_prompts(tokens, np.ones(tokens.shape, bool))
    _check_new_tokens(new_tokens)
    if isinstance(model, T5):
        raise UserError("stream needs a decoder, got a T5: use generate")
    decoder: Any = model
    context = decoder.context_length if context is None else context
    if not 0 < context <= decoder.context_length:
        raise UserError(f"context must be in [1, {decoder.context_length}], got {context}: use None for the model's")
    graphdef, _ = nnx.split(model)
    return _stream(_Program(graphdef, params, context, sampling), tokens[0].tolist(), new_tokens, stop, seed)


class _Options(NamedTuple):
    """What a compiled `_generate` is specialized to."""

    new_tokens: int
    sampling: Sampling
    stop: int | None
    min_new_tokens: int
    pad: int


def _check_prompts(tokens: np.ndarray, real: np.ndarray) -> None:
    if tokens.ndim != 2 or tokens.size == 0:
        raise UserError(f"prompts must be [rows, tokens] with at least one token, got shape {list(tokens.shape)}")
    if real.shape != tokens.shape:
        raise UserError(f"mask must have the shape of the prompts, {list(tokens.shape)}, got {list(real.shape)}")


def _check_new_tokens(new_tokens: int) -> None:
    if new_tokens < 1:
        raise UserError(f"new_tokens must be at least 1, got {new_tokens}")


def _check_left_padding(real: np.ndarray) -> None:
    if (real[:, :-1] & ~real[:, 1:]).any() or not real[:, -1].all():
        row = int(((real[:, :-1] & ~real[:, 1:]).any(axis=1) | ~real[:, -1]).argmax())
        raise UserError(f"prompt {row} must be padded on the left only: move its tokens to the end of the row")


@partial(jax.jit, static_argnums=(0, 5))
@accepts_forms
def _generate(
    graphdef: Any, params: Any, prompts: jax.Array, real: jax.Array | None, rng: jax.Array, options: _Options
) -> jax.Array:
    model: Any = nnx.merge(graphdef, params)
    new_tokens, sampling, stop, min_new_tokens, pad = options
    begin = _encode_sources if isinstance(model, T5) else _read_prompts
    logits, cache, decoder = begin(model, prompts, real)

    def choose(i: jax.Array, logits: jax.Array, unfinished: jax.Array) -> tuple[jax.Array, jax.Array]:
        if stop is not None and min_new_tokens:
            logits = jnp.where(i < min_new_tokens, logits.at[:, stop].set(-jnp.inf), logits)
        token = jnp.where(unfinished, sampling.choose(logits, jax.random.fold_in(rng, i)), pad)
        return token, unfinished if stop is None else unfinished & (token != stop)

    def condition(end: int, state: tuple[Any, ...]) -> jax.Array:
        i, _, unfinished, _ = state
        return (i < end) & unfinished.any()

    def step(state: tuple[jax.Array, jax.Array, jax.Array, Any]) -> tuple[Any, ...]:
        i, text, unfinished, cache = state
        logits, cache = decoder.step(lax.dynamic_slice_in_dim(text, i - 1, 1, axis=1), i, cache)
        token, unfinished = choose(i, logits[:, -1], unfinished)
        return i + 1, lax.dynamic_update_slice_in_dim(text, token[:, None], i, axis=1), unfinished, cache

    token, unfinished = choose(jnp.zeros([], np.int32), logits[:, -1], jnp.ones(len(prompts), bool))
    text = jnp.full((len(prompts), new_tokens), pad, np.int32).at[:, 0].set(token)
    i = jnp.ones([], np.int32)
    for slots in _stages(decoder.read, decoder.read + new_tokens - 1):
        cache, end = decoder.resize(cache, slots), slots - decoder.read + 1
        i, text, unfinished, cache = lax.while_loop(partial(condition, end), step, (i, text, unfinished, cache))
    return text


_BLOCK = 256
"""The slots of a cache are a multiple of this number, or those of the whole text."""


def _stages(tokens: int, most: int) -> list[int]:
    """Return the numbers of slots that the cache of a growing text has in turn, the last of them `most`.

    A token is computed from all slots, used or not. Each number is half as many again, or a block more, so that at most
    a third of a long text's slots are unused; each takes a loop of its own to compile.

    >>> _stages(9, 100), _stages(1024, 4096)
    ([100], [1536, 2304, 3584, 4096])
    """
    stages = []
    while tokens < most:
        tokens = min(_more_slots(tokens), most)
        stages.append(tokens)
    return stages


def _more_slots(tokens: int) -> int:
    return _in_blocks(tokens + max(tokens // 2, 1))


def _in_blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK


class _Decoder(NamedTuple):
    """How the tokens after the first are computed."""

    read: int
    """Number of tokens in the cache."""
    step: DecodeStep
    resize: Callable[[Any, int], Any]
    """(cache, slots) -> the cache with that many slots."""


def _read_prompts(model: Any, prompts: jax.Array, real: jax.Array | None) -> tuple[jax.Array, Any, _Decoder]:
    """Return the logits of a decoder after its prompts, its cache, and its step."""
    # XLA would compute the logits of all tokens, and then use the last.
    rows, length = prompts.shape
    positions, lengths = None, jnp.full(rows, length, np.int32)
    if real is not None:
        positions, lengths = jnp.maximum(jnp.cumsum(real, axis=1, dtype=np.int32) - 1, 0), real.sum(1, dtype=np.int32)
    segments = None if real is None else real.astype(np.int32)
    features, _, cache = model.features(prompts, None, positions, segments, model.empty_cache(rows, 0))

    def decode(last: jax.Array, written: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return model(last, None, (lengths + written - 1)[:, None], None, cache)

    logits = model.logits(features[:, -1:])
    return logits, cache, _Decoder(length, decode, lambda cache, slots: cache.resized(model.empty_cache(rows, slots)))


def _encode_sources(model: T5, sources: jax.Array, real: jax.Array | None) -> tuple[jax.Array, Any, _Decoder]:
    """Return the logits of a T5's decoder after its start token, its cache, and its step."""
    rows = len(sources)
    cache = model.init_cache(model.encode(sources, real), real, 0)
    start = jnp.full((rows, 1), model.config.decoder_start_token_id, np.int32)
    logits, cache = model.decode_cached(start, cache)

    def resize(cache: DecoderCache, slots: int) -> DecoderCache:
        return cache._replace(tokens=cache.tokens.resized(model.empty_cache(rows, slots)))

    return logits, cache, _Decoder(1, lambda last, written, cache: model.decode_cached(last, cache), resize)


class _Program(NamedTuple):
    """A decoder, its parameters, the largest number of tokens that it computes one from, and how it chooses tokens."""

    graphdef: Any
    params: Any
    context: int
    sampling: Sampling


def _stream(program: _Program, text: list[int], new_tokens: int, stop: int | None, seed: int) -> Iterator[int]:
    graphdef, params, context, sampling = program
    key, length, slots = jax.random.key(seed), context, 0
    for i in range(new_tokens):
        rng = jax.random.fold_in(key, i)
        if length == context:
            recent = text[-context:] if i == 0 else text[-max(context // 2, 1) :]
            length = len(recent)
            slots = min(_in_blocks(length), context)
            window = np.zeros((1, slots), np.int32)
            window[0, :length] = recent
            token, cache = _read_window(graphdef, params, window, np.int32(length), rng, sampling)
        else:
            if length == slots:
                slots = min(_more_slots(slots), context)
                cache = _grow(graphdef, params, cache, slots)
            length += 1
            token, cache = _read_token(graphdef, params, np.array([text[-1:]], np.int32), cache, rng, sampling)
        text.append(int(token))
        yield text[-1]
        if text[-1] == stop:
            return


@partial(jax.jit, static_argnums=(0, 5))
@accepts_forms
def _read_window(
    graphdef: Any, params: Any, window: jax.Array, length: jax.Array, rng: jax.Array, sampling: Sampling
) -> tuple[jax.Array, KVCache]:
    """Return the token that follows the first `length` tokens of a window int [1, S], and a cache that holds them."""
    model: Any = nnx.merge(graphdef, params)
    real = (jnp.arange(window.shape[1]) < length).astype(np.int32)[None]
    features, _, cache = model.features(window, None, None, real, model.empty_cache(1, 0))
    last = model.logits(lax.dynamic_slice_in_dim(features, length - 1, 1, axis=1))[:, 0]
    # The tokens to come overwrite the padding.
    cache = cache._replace(length=length).resized(model.empty_cache(*window.shape))
    return sampling.choose(last, rng)[0], cache


@partial(jax.jit, static_argnums=(0, 3))
@accepts_forms
def _grow(graphdef: Any, params: Any, cache: KVCache, slots: int) -> KVCache:
    """Return the cache of one row with more slots."""
    grown: KVCache = cache.resized(nnx.merge(graphdef, params).empty_cache(1, slots))
    return grown


@partial(jax.jit, static_argnums=(0, 5), donate_argnums=3)
@accepts_forms
def _read_token(
    graphdef: Any, params: Any, last: jax.Array, cache: KVCache, rng: jax.Array, sampling: Sampling
) -> tuple[jax.Array, KVCache]:
    """Return the token that follows `last` int [1, 1] and those in the cache, and the cache that holds them all."""
    logits, cache = nnx.merge(graphdef, params)(last, None, None, None, cache)
    return sampling.choose(logits[:, -1], rng)[0], cache
