"""Answers that a model writes to the prompts of held-out examples."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import jaxtrain as jt
from jaxtrain.data import decode_stream
from jaxtrain.data.finetuning import EncodedExamples, ModelTokenizer, PlainText, Preference
from jaxtrain.models import Sampling, generate, stream


class Question(NamedTuple):
    """The prompt of an example.

    Attributes:
      prompt: Tokens before the first one in the loss, int32 [N].
      answer: Text in the loss that follows.
    """

    prompt: np.ndarray
    answer: str


def questions(examples: EncodedExamples, texts: ModelTokenizer, count: int, longest: int) -> list[Question]:
    """Return the questions of the first examples; none for texts without prompts.

    Args:
      examples: Encoded examples; of a preference the chosen answer is taken.
      texts: Tokenizer.
      count: Number of questions.
      longest: Number of tokens of the longest prompt.
    """
    found: list[Question] = []
    if examples.kind is PlainText:
        return found
    for i in range(0, len(examples), 2 if examples.kind is Preference else 1):
        if len(found) == count:
            break
        tokens, mask = examples[i]
        start = int(mask.argmax())
        if 0 < start <= longest:
            after = np.flatnonzero(~mask[start:])
            stop = start + int(after[0]) if len(after) else len(tokens)
            found.append(Question(tokens[:start], texts.decode(tokens[start:stop])))
    return found


def end_token(texts: ModelTokenizer) -> int | None:
    """Return the token that ends an answer; None if the tokenizer has none."""
    try:
        return texts.special("end")
    except jt.UserError:
        return None


def answer(model: Any, params: Any, asked: list[Question], texts: ModelTokenizer, new_tokens: int) -> list[str]:
    """Return the most likely answer to each question.

    Args:
      model: The decoder; only its structure is used.
      params: Its parameters.
      asked: The questions, at least one.
      texts: Tokenizer.
      new_tokens: Number of tokens of the longest answer.
    """
    width, end = max(len(question.prompt) for question in asked), end_token(texts)
    pad = texts.special("pad") if end is None else end
    prompts = np.full((len(asked), width), pad, np.int32)
    mask = np.zeros(prompts.shape, bool)
    for row, question in enumerate(asked):
        start = width - len(question.prompt)
        prompts[row, start:], mask[row, start:] = question.prompt, True
    written = np.asarray(generate(model, params, prompts, new_tokens, mask=mask, stop=end, pad=pad))
    return [texts.decode(row) for row in written]


def answer_table(asked: list[Question], answers: list[str], texts: ModelTokenizer) -> jt.Table:
    """Return answers beside their prompts and the answers of the examples."""
    rows = [(texts.decode_all(q.prompt), text, q.answer) for q, text in zip(asked, answers, strict=True)]
    return jt.Table(columns=["prompt", "generated", "expected"], rows=rows)


def reply(
    model: Any,
    params: Any,
    texts: ModelTokenizer,
    prompt: str,
    *,
    is_chat: bool,
    length: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """Yield a text and its continuation in chunks; in a chat the assistant answers the text on a line of its own."""
    messages = [{"role": "user", "content": prompt}]
    start = (texts.encode_chat(messages, add_generation_prompt=True) if is_chat else texts.encode(prompt)).tolist()
    tokens = stream(model, params, start, length, sampling=Sampling(temperature), stop=end_token(texts), seed=seed)
    chunks = decode_stream(texts, start, tokens)
    return itertools.chain([f"{prompt}\n"], itertools.islice(chunks, 1, None)) if is_chat else chunks
