"""Generation of text, from text: `jaxtrain.models.generation` with a tokenizer."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from jaxtrain.data import Tokenizer, decode_stream
from jaxtrain.models.generation import GREEDY, Sampling, generate, stream
from jaxtrain.models.t5 import T5


def stream_text(
    model: nnx.Module,
    params: Any,
    texts: Tokenizer,
    prompt: str,
    new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Iterator[str]:
    """Generate a continuation of a text with `stream` and yield it in chunks as it is computed.

    Args:
      model: Decoder. Only its structure is used, so the result of `nnx.eval_shape` will do.
      params: Parameters of `model`, as `jaxtrain.models.functional` returns them.
      texts: Tokenizer of the model.
      prompt: Text of at least one token.
      new_tokens: Number of tokens to generate.
      sampling: Rule by which tokens are chosen.
      seed: Seed of the draws.

    Returns:
      An iterator of the prompt and the chunks after it. An incomplete character at the end is left out.
    """
    start = texts.encode(prompt).tolist()
    return decode_stream(texts, start, stream(model, params, start, new_tokens, sampling=sampling, seed=seed))


def generate_texts(model: T5, params: Any, texts: Tokenizer, sources: Any, new_tokens: int) -> list[str]:
    """Generate the text of every source by greedy decoding, up to its end token.

    Args:
      model: Model. Only its structure is used, so the result of `nnx.eval_shape` will do.
      params: Parameters of `model`, as `jaxtrain.models.functional` returns them.
      texts: Tokenizer of the model.
      sources: Padded tokens int [B, S], as `jaxtrain.data.encode_pair` returns them.
      new_tokens: Largest number of tokens of a text, its end token included.

    Returns:
      A text for every source.
    """
    pad, end = texts.special("pad"), texts.special("end")
    generated = generate(model, params, sources, new_tokens, mask=sources != pad, stop=end, pad=pad)
    return [texts.decode(_truncate_at(row, end)) for row in np.asarray(generated)]


def _truncate_at(tokens: np.ndarray, end: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0]] if len(ends) else tokens
