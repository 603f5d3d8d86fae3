"""Examples as tokens, with a mask of those that the model learns to write.

A conversation is in the loss where the assistant writes:

- Where the template has `{% generation %}` blocks, the mask is that of `return_assistant_tokens_mask` in
  `transformers`, to the letter: a block whose first character is in no token, as a space may be if the tokenizer
  removes spaces from its offsets, is not in the loss, nor are those after it.
- Otherwise the text of message `i` of the assistant is the difference of two prefixes of the whole text: of messages
  0 to `i` rendered, without that of messages 0 to `i - 1` rendered with the generation prompt. It includes what the
  template writes after an answer, such as the token that ends the turn; an `eos_token` that it writes at the end of
  the text alone belongs to the last answer. A template whose whole text does not start with both is refused; for
  instance, one that removes the reasoning from earlier answers, or whose generation prompt opens a reasoning that
  messages lack.

A completion is in the loss from its first character on, and a token with characters of both prompt and completion is.
Around plain texts, and prompts and completions that are texts, stand the special tokens that the tokenizer adds, and
`eos_token` is last; around messages, what the template writes, and no more.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.chat_template import ChatTemplate, Span
from jaxtrain.data.finetuning.examples import (
    Completion,
    Conversation,
    FineTuningExample,
    Messages,
    PlainText,
    Preference,
)
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.tokens import Tokens
from jaxtrain.errors import UserError

_BATCH = 64  # texts that are tokenized at once


class Encoded(NamedTuple):
    """An example, or one of the two of a preference.

    Attributes:
      tokens: Tokens int32 [N].
      mask: Whether a token is in the loss, bool [N].
    """

    tokens: Tokens
    mask: NDArray[np.bool_]


class _Rendered(NamedTuple):
    """A text with the spans that are in the loss.

    Attributes:
      is_whole: Whether the text has all its special tokens, as that of a chat template.
      is_generation: Whether the spans are those of generation blocks.
    """

    text: str
    spans: list[Span]
    is_whole: bool
    is_generation: bool = False


def encode_example(example: FineTuningExample, texts: ModelTokenizer) -> tuple[Encoded, ...]:
    """Return an example as tokens; a preference as two, the chosen and the rejected one.

    Args:
      example: Example of any kind.
      texts: Tokenizer.

    Raises:
      UserError: The template refuses the example or is not stable, or the tokenizer has no `eos_token`.
    """
    return next(encode_each([example], texts))


def encode_each(examples: Iterable[FineTuningExample], texts: ModelTokenizer) -> Iterator[tuple[Encoded, ...]]:
    """Return examples as `encode_example` does, tokenized in several threads."""
    iterator = iter(examples)
    while batch := [_render(example, texts) for example in islice(iterator, _BATCH)]:
        flat = [rendered for example in batch for rendered in example]
        encoded = iter(_encode(flat, texts))
        yield from (tuple(islice(encoded, len(example))) for example in batch)


def _render(example: FineTuningExample, texts: ModelTokenizer) -> tuple[_Rendered, ...]:
    try:
        match example:
            case PlainText():
                return (_Rendered(example.text, [Span(0, len(example.text))], is_whole=False),)
            case Conversation():
                return (_render_conversation(example.messages, example.tools, texts.chat_template(example.tools)),)
            case Completion():
                completions: tuple[str | Messages, ...] = (example.completion,)
            case Preference():
                completions = (example.chosen, example.rejected)
        return tuple(_render_completion(example.prompt, completion, example.tools, texts) for completion in completions)
    except UserError as error:
        raise UserError(f"{example.where}: {error}") from None


def _render_completion(
    prompt: str | Messages, completion: str | Messages, tools: list[Any] | None, texts: ModelTokenizer
) -> _Rendered:
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        return _Rendered(text, [Span(len(prompt), len(text))], is_whole=False)
    assert not isinstance(prompt, str)
    assert not isinstance(completion, str)
    template = texts.chat_template(tools)
    start = template.render(prompt, tools, add_generation_prompt=True)
    text = template.render(prompt + completion, tools)
    if not text.startswith(start):
        raise _unstable(template, len(prompt) + 1)
    return _Rendered(text, [Span(len(start), len(text))], is_whole=True)


def _render_conversation(messages: Messages, tools: list[Any] | None, template: ChatTemplate) -> _Rendered:
    text, spans = template.render_spans(messages, tools)
    if template.marks_generation:
        return _Rendered(text, spans, is_whole=True, is_generation=True)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = template.render(messages[:i], tools, add_generation_prompt=True)
            after = _stable_prefix(template, messages, i + 1, tools, text)
            if not after.startswith(before):
                raise _unstable(template, i + 1)
            spans.append(Span(len(before), len(after)))
    return _Rendered(text, spans, is_whole=True)


def _stable_prefix(template: ChatTemplate, messages: Messages, count: int, tools: list[Any] | None, text: str) -> str:
    """Return the part of the text of all messages that the first ones have."""
    if count == len(messages):
        return text
    prefix = template.render(messages[:count], tools)
    # Some templates, such as that of Phi-3, end the conversation, and not every answer, with this token.
    for stable in (prefix, prefix.removesuffix(template.variables.get("eos_token", ""))):
        if text.startswith(stable):
            return stable
    raise _unstable(template, count)


def _unstable(template: ChatTemplate, number: int) -> UserError:
    return UserError(
        f"{template.name} renders the messages up to {number} differently when others follow, so that its part of the"
        " text is unknown: mark the assistant's text in the template by {% generation %}…{% endgeneration %}, or use"
        " conversations with one answer"
    )


def _encode(rendered: Sequence[_Rendered], texts: ModelTokenizer) -> list[Encoded]:
    encodings: dict[int, Any] = {}
    for is_whole in (True, False):
        numbers = [i for i, one in enumerate(rendered) if one.is_whole == is_whole]
        found = texts.encodings([rendered[i].text for i in numbers], add_special_tokens=not is_whole) if numbers else []
        encodings |= zip(numbers, found, strict=True)
    return [_masked(one, encodings[i], texts) for i, one in enumerate(rendered)]


def _masked(rendered: _Rendered, encoding: Any, texts: ModelTokenizer) -> Encoded:
    tokens = np.array(encoding.ids, np.int32)
    mask = (
        _generation_mask(encoding, rendered.spans) if rendered.is_generation else _span_mask(encoding, rendered.spans)
    )
    if rendered.is_whole:
        return Encoded(tokens, mask)
    end = texts.special("end")
    if not len(tokens) or tokens[-1] != end:
        tokens, mask = np.append(tokens, np.int32(end)), np.append(mask, True)
    mask[-1] = True
    return Encoded(tokens, mask)


def _span_mask(encoding: Any, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that have a character of a span."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), bool)
    for start, stop in spans:
        # The offsets of a token of white space may be empty: then it ends where they are.
        mask |= (stops > start) & ((starts < stop) | ((starts == stops) & (stops == stop)))
    return mask


def _generation_mask(encoding: Any, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return the mask of `transformers`: a span ends with the first token of its last character."""
    mask = np.zeros(len(encoding.ids), bool)
    for start, stop in spans:
        if not stop:
            continue
        first, last = encoding.char_to_token(start), encoding.char_to_token(stop - 1)
        if first is None:
            break
        mask[first : last + 1 if last else None] = True
    return mask
