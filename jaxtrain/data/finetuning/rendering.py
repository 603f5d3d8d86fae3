"""Examples as texts, with the spans that the model learns to write.

An answer of the assistant is learned as the model writes it. Its prompt is the text of the messages before it with the
generation prompt, its text that of the messages up to it:

- One text holds several answers where the template renders them alike with later messages: the text of all messages
  then starts with the texts of earlier answers. An `eos_token` that the template writes at the end of the text alone
  belongs to the last answer.
- Otherwise, as where a template removes the reasoning from earlier answers, each answer that no later text holds has a
  text of its own, which ends with it (https://github.com/QwenLM/Qwen3/discussions/1398).
- A generation prompt may open a reasoning that the template does not write in answers, as that of DeepSeek-R1. The
  text is then the prompt, the reasoning of the message, which may be empty, its end, and the answer.

Where the template has `{% generation %}` blocks, a conversation is one text, and these are the spans.

An answer of weight 0 is in no span.
"""

import re
from typing import Any, NamedTuple

from jaxtrain.data.finetuning.chat_template import ChatTemplate, Span, reasoning_of
from jaxtrain.data.finetuning.examples import Completion, Conversation, FineTuningExample, Message, Messages, PlainText
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.finetuning.template_fields import unread_of
from jaxtrain.errors import UserError

_THINK, _END_OF_THINK = "<think>", "</think>"
_OPEN = re.compile(rf"{_THINK}\s*\Z")


class Rendered(NamedTuple):
    """A text with the spans that are in the loss.

    Attributes:
      text: The text.
      spans: What is in the loss.
      is_whole: Whether the text has all its special tokens, as that of a chat template.
      cut: Where the last answer starts if its generation prompt opens a reasoning, None otherwise. The prompt is
        tokenized alone when an answer is generated, so that no token may have characters of both.
      unread: Names of the fields of the messages that the chat template does not read.
    """

    text: str
    spans: list[Span]
    is_whole: bool
    cut: int | None = None
    unread: tuple[str, ...] = ()


class _Turn(NamedTuple):
    """An answer: its text, which starts with its prompt, and whether the prompt opens a reasoning."""

    text: str
    start: int
    is_opened: bool

    @property
    def is_last(self) -> bool:
        """Whether no later answer shares the text: there the white space after the prompt is tokenized with it."""
        return self.is_opened and self.text[self.start : self.start + 1].isspace()


def render_example(example: FineTuningExample, texts: ModelTokenizer) -> tuple[Rendered, ...]:
    """Return an example as one or several texts; a preference as two, the chosen and the rejected one.

    Args:
      example: Example of any kind.
      texts: Tokenizer.

    Raises:
      UserError: The template refuses the example or is not stable.
    """
    try:
        if isinstance(example, PlainText):
            return (Rendered(example.text, [Span(0, len(example.text))], is_whole=False),)
        if isinstance(example, Conversation):
            return _conversation(example.messages, example.tools, texts)
        if isinstance(example, Completion):
            return _completion(example.prompt, example.completion, example.tools, texts)
        sides = (
            _completion(example.prompt, completion, example.tools, texts)
            for completion in (example.chosen, example.rejected)
        )
        return tuple(_single(side) for side in sides)
    except UserError as error:
        raise UserError(f"{example.where}: {error}") from None


def _single(side: tuple[Rendered, ...]) -> Rendered:
    if len(side) > 1:
        raise UserError(
            f"the chat template rewrites earlier answers, so that the {len(side)} answers are no single text: use"
            " preferences with one answer"
        )
    return side[0]


def _completion(
    prompt: str | Messages, completion: str | Messages, tools: list[Any] | None, texts: ModelTokenizer
) -> tuple[Rendered, ...]:
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        return (Rendered(text, [Span(len(prompt), len(text))], is_whole=False),)
    assert not isinstance(prompt, str)
    assert not isinstance(completion, str)
    template, messages = texts.chat_template(tools).recording(), prompt + completion
    return _named(_answers(template, messages, len(prompt), tools, texts), template, messages, tools)


def _conversation(messages: Messages, tools: list[Any] | None, texts: ModelTokenizer) -> tuple[Rendered, ...]:
    template = texts.chat_template(tools).recording()
    if template.marks_generation:
        text, spans = template.render_spans(messages, tools)
        found: tuple[Rendered, ...] = (Rendered(text, _of_weight(messages, spans, template), is_whole=True),)
    else:
        found = _answers(template, messages, 0, tools, texts)
    return _named(found, template, messages, tools)


def _named(
    found: tuple[Rendered, ...], template: ChatTemplate, messages: Messages, tools: list[Any] | None
) -> tuple[Rendered, ...]:
    unread = unread_of(template, messages, tools)
    return tuple(rendered._replace(unread=unread) for rendered in found)


def _of_weight(messages: Messages, spans: list[Span], template: ChatTemplate) -> list[Span]:
    """Return the spans of the answers in the loss."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(map(_is_learned, answers)):
        return spans
    if len(spans) != len(answers):
        raise UserError(
            f"{template.name} marks {len(spans)} texts for {len(answers)} answers, so that those of weight 0 are"
            " unknown: leave the weights out"
        )
    return [span for span, message in zip(spans, answers, strict=True) if _is_learned(message)]


def _is_learned(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _answers(
    template: ChatTemplate, messages: Messages, first: int, tools: list[Any] | None, texts: ModelTokenizer
) -> tuple[Rendered, ...]:
    """Return the texts that hold the answers among the messages from number `first` on, each answer once."""
    turns = [
        _turn(template, messages[: i + 1], tools)
        for i, message in enumerate(messages)
        if i >= first and _is_learned(message)
    ]
    found: list[tuple[str, list[_Turn], list[Span]]] = [(template.render(messages, tools), [], [])]
    for turn in reversed(turns):
        text, held, spans = found[-1]
        stop = None if turn.is_last and text != turn.text else _shared(text, turn.text, texts)
        if stop is None:
            stop, held, spans = len(turn.text), [], []
            found.append((turn.text, held, spans))
        held.insert(0, turn)
        spans.insert(0, Span(turn.start, stop))
    return tuple(
        Rendered(text, spans, is_whole=True, cut=held[-1].start if held and held[-1].is_opened else None)
        for text, held, spans in reversed(found)
        if held or not turns
    )


def _shared(text: str, turn: str, texts: ModelTokenizer) -> int | None:
    """Return where the text of a turn ends in another that holds it, None if that does not."""
    if text.startswith(turn):
        return len(turn)
    # Some templates, such as that of Phi-3, end the conversation, and not every answer, with this token.
    shorter = turn.removesuffix(texts.special_tokens.get("eos_token", ""))
    return len(shorter) if text.startswith(shorter) and texts.ends_in_added_token(shorter) else None


def _turn(template: ChatTemplate, messages: Messages, tools: list[Any] | None) -> _Turn:
    """Return the last message as the model writes it."""
    prompt = template.render(messages[:-1], tools, add_generation_prompt=True)
    text = template.render(messages, tools)
    thought = _OPEN.search(prompt)
    if not text.startswith(prompt):
        if thought is None or not text.startswith(prompt[: thought.start()]):
            raise UserError(
                f"{template.name} renders the messages before number {len(messages)} differently than their generation"
                " prompt, so that what the model writes is unknown: mark it in the template by {% generation"
                " %}…{% endgeneration %}, or remove the reasoning of earlier messages"
            )
        text = prompt + _reasoned(messages[-1], text[thought.start() :])
        template.note_reasoning(len(messages) - 1)
    return _Turn(text, len(prompt), thought is not None)


def _reasoned(message: Message, answer: str) -> str:
    """Return an answer after an open reasoning, from what the template writes of it."""
    if answer.startswith(_THINK):
        return answer.removeprefix(_THINK).lstrip()
    reasoning, content = reasoning_of(message), message.get("content")
    if reasoning is None and isinstance(content, str) and _END_OF_THINK in content:
        reasoning = content.partition(_END_OF_THINK)[0].rpartition(_THINK)[2]
    gap = "" if answer[:1].isspace() else "\n\n"
    return f"{str(reasoning or '').strip()}\n{_END_OF_THINK}{gap}{answer}"
