"""Answers that a model writes to prompts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

import jaxtrain as jt
from jaxtrain.data import decode_stream
from jaxtrain.data.finetuning import EncodedExamples, ModelTokenizer, PlainText, Preference
from jaxtrain.models import Sampling
from jaxtrain.recipes.finetuning.pretrained_decoder import Decoder

_ROWS = 64  # of a batch, at most
_SHORTEST = 32  # width of a batch


class Question(NamedTuple):
    """The prompt of an example.

    Attributes:
      prompt: Tokens before the first one in the loss, int32 [N].
      answer: Tokens in the loss that follow, without that which ends the answer, int32 [M].
    """

    prompt: np.ndarray
    answer: np.ndarray


def questions(examples: EncodedExamples, count: int | None, longest: int, end: int | None) -> list[Question]:
    """Return the questions of examples drawn at random, always the same ones; none for texts without prompts.

    Args:
      examples: Encoded examples; of a preference the chosen answer is taken.
      count: Number of questions; None for all, in the order of the examples.
      longest: Number of tokens of the longest prompt; examples with longer ones are left out.
      end: Token that ends an answer; None if the tokenizer has none.
    """
    found: list[Question] = []
    if examples.kind is PlainText:
        return found
    order = np.arange(0, len(examples), 2 if examples.kind is Preference else 1)
    for i in order if count is None else np.random.RandomState(0).permutation(order):
        if len(found) == count:
            break
        tokens, mask = examples[int(i)]
        start = int(mask.argmax())
        if 0 < start <= longest:
            after = np.flatnonzero(~mask[start:] | (tokens[start:] == end))
            stop = start + int(after[0]) if len(after) else len(tokens)
            found.append(Question(tokens[:start], tokens[start:stop]))
    return found


def end_token(texts: ModelTokenizer, is_chat: bool) -> int | None:
    """Return the token that ends an answer, in a chat that of its turn; None if the tokenizer has none."""
    try:
        return (_end_of_turn(texts) if is_chat else None) or texts.special("end")
    except jt.UserError:
        return None


def _end_of_turn(texts: ModelTokenizer) -> int | None:
    """Return the first special token that the chat template writes after an answer."""
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    after = texts.encode(texts.chat_template().render(messages).rpartition("answer")[2]).tolist()
    return next((token for token in after if texts.decode_all([token]) and not texts.decode([token])), None)


def answer(
    decoder: Decoder,
    params: Any,
    prompts: Sequence[np.ndarray],
    texts: ModelTokenizer,
    new_tokens: int,
    *,
    end: int | None,
    batch_tokens: int,
) -> list[str]:
    """Return the most likely answer to each prompt.

    Prompts of similar length are answered together, padded on the left to a power of two: a program is compiled for
    each of a few widths.

    Args:
      decoder: The decoder.
      params: Its parameters, or adapted ones.
      prompts: Tokens of each prompt, int32 [N].
      texts: Tokenizer.
      new_tokens: Number of tokens of the longest answer.
      end: Token that ends an answer; None if the tokenizer has none.
      batch_tokens: Number of tokens that a batch may have with its answers, which bounds the memory of their keys and
        values; a batch has one prompt at least.
    """
    written = [""] * len(prompts)
    pad = texts.special("pad") if end is None else end
    longest = decoder.context_length - new_tokens
    for width, members in _by_width([len(prompt) for prompt in prompts], longest).items():
        rows = min(max(batch_tokens // (width + new_tokens), 1), _ROWS, len(members))
        for first in range(0, len(members), rows):
            batch = members[first : first + rows]
            tokens = np.full((rows, width), pad, np.int32)
            mask = np.zeros((rows, width), bool)
            mask[:, -1] = True  # of rows without a prompt
            for row, i in enumerate(batch):
                start = width - len(prompts[i])
                tokens[row, start:], mask[row, start:] = prompts[i], True
            answers = np.asarray(decoder.generate(params, tokens, new_tokens, mask=mask, stop=end, pad=pad))
            for row, i in enumerate(batch):
                written[i] = texts.decode(answers[row])
    return written


def reply(
    decoder: Decoder,
    params: Any,
    texts: ModelTokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    is_chat: bool,
    length: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """Yield the answer to a conversation in chunks; without a chat template the last message alone is continued."""
    if is_chat:
        start = texts.encode_chat([dict(message) for message in messages], add_generation_prompt=True).tolist()
    else:
        start = texts.encode(messages[-1]["content"]).tolist()
    end = end_token(texts, is_chat)
    tokens = decoder.stream(params, start, length, sampling=Sampling(temperature), stop=end, seed=seed)
    return islice(decode_stream(texts, start, tokens), 1, None)  # without the prompt


def _by_width(lengths: Sequence[int], longest: int) -> Mapping[int, list[int]]:
    """Return the numbers of the prompts that are padded to each width.

    >>> _by_width([3, 40, 33, 70], longest=100)
    {32: [0], 64: [1, 2], 100: [3]}
    """
    found: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        width = max(_SHORTEST, 1 << (length - 1).bit_length())
        found.setdefault(max(min(width, longest), length), []).append(i)
    return found
