"""The four kinds of examples to fine-tune on, recognized by the names of their fields.

| kind | fields |
| --- | --- |
| `Preference` | `chosen` and `rejected`, and `prompt` if these do not contain it |
| `Conversation` | `messages`, or ShareGPT's `conversations` |
| `Completion` | `prompt` or `question`, and `completion`, `response` or `answer` |
| `PlainText` | `text` |

A row that has the fields of several kinds is of the first of them. Prompts, completions and preferences are texts or
messages. A message is `{"role": …, "content": …}`, or ShareGPT's `{"from": …, "value": …}`; other fields of a
message, such as `tool_calls`, are passed to the chat template. The field `tools` lists the tools of a conversation, as
JSON Schemas or as their JSON. The field `weight` is the weight of an example in the loss, a number of at least 0, 1 if
it is missing. A field that is null counts as missing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxtrain.errors import UserError

Message: TypeAlias = dict[str, Any]
"""Type of a message: `{"role": …, "content": …}`, and what else the chat template reads."""
Messages: TypeAlias = tuple[Message, ...]

_PROMPTS, _COMPLETIONS = ("prompt", "question"), ("completion", "response", "answer")
_CONVERSATIONS = ("messages", "conversations")
# ShareGPT has no specification: the names of roles in its files and their descendants.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
_LARGEST_WEIGHT = 1e30  # far from the largest float32
_ALIKE = "chosen and rejected do not differ in their answer: remove the example"
_FORM = 'write messages as [{"role": "user", "content": "…"}, …]'


@dataclass(frozen=True)
class PlainText:
    """A text to continue: every token is in the loss.

    Attributes:
      text: The text.
      where: Where it is, for messages.
      weight: Weight in the loss.
    """

    text: str
    where: str
    weight: float = 1.0


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, which alone is in the loss: both texts, or both messages.

    Attributes:
      prompt: Text or messages before the completion.
      completion: Text or messages to learn.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      weight: Weight in the loss.
    """

    prompt: str | Messages
    completion: str | Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0


@dataclass(frozen=True)
class Conversation:
    """A conversation: the messages of the assistant are in the loss.

    Attributes:
      messages: The messages.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      weight: Weight in the loss.
    """

    messages: Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0


@dataclass(frozen=True)
class Preference:
    """A prompt with two completions, of which the first is preferred: all texts, or all messages.

    Attributes:
      prompt: Text or messages before the completions.
      chosen: The completion that is preferred.
      rejected: The other completion.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      weight: Weight in the loss.
    """

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0


FineTuningExample: TypeAlias = PlainText | Completion | Conversation | Preference
"""Type of an example of any kind."""


def parse_example(row: Mapping[str, Any], where: str) -> FineTuningExample:
    """Return the example in a row of a file.

    Args:
      row: Values by field.
      where: Where the row is, for messages.

    Raises:
      UserError: The row has the fields of no kind, or one of them is malformed.

    Example:
      >>> parse_example({"question": "6 * 7?", "answer": "42", "id": 3}, "a.jsonl, line 1").completion
      '42'
      >>> parse_example({"conversations": [{"from": "human", "value": "Hi"}]}, "a.jsonl, line 2").messages
      ({'role': 'user', 'content': 'Hi'},)
      >>> parse_example({"prompt": "6 * 7?"}, "a.jsonl, line 3")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxtrain.errors.UserError: a.jsonl, line 3 has only the fields prompt: name them text; prompt and completion; ...
    """
    fields = {name: value for name, value in row.items() if value is not None}
    prompt, completion, conversation = (
        next((name for name in names if name in fields), None) for names in (_PROMPTS, _COMPLETIONS, _CONVERSATIONS)
    )
    tools, weight = _tools(fields.get("tools"), where), _weight(fields.get("weight", 1.0), where)
    if "chosen" in fields and "rejected" in fields:
        example = _preference(fields, None if prompt is None else fields[prompt], tools, where)
        return replace(example, weight=weight)
    if conversation is not None:
        return Conversation(_messages(fields[conversation], conversation, where), tools, where, weight)
    if prompt is not None and completion is not None:
        start, end = (_text_or_messages(fields[name], name, where) for name in (prompt, completion))
        _check_alike([start, end], f"{prompt} and {completion}", where)
        return Completion(start, end, tools, where, weight)
    if "text" in fields:
        return PlainText(_text(fields["text"], "text", where), where, weight)
    raise UserError(
        f"{where} has only the fields {', '.join(fields) or 'of no value'}: name them text; prompt and completion;"
        " messages; or prompt, chosen and rejected"
    )


def _preference(fields: Mapping[str, Any], prompt: Any, tools: list[Any] | None, where: str) -> Preference:
    chosen, rejected = (_text_or_messages(fields[name], name, where) for name in ("chosen", "rejected"))
    _check_alike([chosen, rejected], "chosen and rejected", where)
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None:
            raise UserError(f"{where} has no prompt beside chosen and rejected: add the text before them")
        if chosen == rejected:
            raise UserError(f"{where}: {_ALIKE}")
        return Preference(_text(prompt, "prompt", where), chosen, rejected, tools, where)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared:  # Both contain the prompt, as in UltraFeedback, which repeats it as a text.
        start, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not (chosen and rejected):
            raise UserError(f"{where}: {_ALIKE}")
    elif isinstance(prompt, str):
        start = ({"role": "user", "content": _text(prompt, "prompt", where)},)
    else:
        start = _messages(prompt, "prompt", where)
    return Preference(start, chosen, rejected, tools, where)


def _check_alike(values: list[Any], names: str, where: str) -> None:
    if len({isinstance(value, str) for value in values}) > 1:
        raise UserError(f"{where}: of {names} one is text and the other messages: write both alike")


def _text_or_messages(value: Any, name: str, where: str) -> str | Messages:
    if isinstance(value, str):
        return _text(value, name, where)
    if not isinstance(value, list):
        raise UserError(f"{where}: {name} is {_kind(value)}, neither text nor messages: write it as a string")
    return _messages(value, name, where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} is {_kind(value)}, not text: write it as a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can escape half of a character
        raise UserError(f"{where}: {name} has an incomplete \\u escape: write the file again as UTF-8") from None
    return value


def _messages(value: Any, name: str, where: str) -> Messages:
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else _kind(value)
        raise UserError(f"{where}: {name} is {what}: {_FORM}")
    return tuple(_message(item, f"{where}: message {number}") for number, item in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {_kind(value)}: {_FORM}")
    message = {name: _json(item, name, where) for name, item in value.items() if item is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message["role"] = _ROLES.get(role, role)
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise UserError(f"{where} has no role: {_FORM}")
    content = message.get("content")
    # An assistant that calls tools may say nothing; a list holds parts, such as {"type": "text", "text": "…"}.
    if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
        raise UserError(f"{where} has no content that is text: {_FORM}")
    return message


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: tools is not valid JSON ({error}): write a list of JSON Schemas") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{where}: tools is not a list of objects: write a list of JSON Schemas")
    return [_json(tool, "tools", where) for tool in value]


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST_WEIGHT:
        raise UserError(f"{where}: weight is {value!r}, not a number of at least 0: correct it, or rename the field")
    return float(value)


def _json(value: Any, name: str, where: str) -> Any:
    """Return a value with what JSON has alone: a template could call methods of other objects."""
    if isinstance(value, str):
        return _text(value, name, where)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [_json(item, name, where) for item in value]
    if isinstance(value, dict):
        return {str(key): _json(item, name, where) for key, item in value.items()}
    raise UserError(f"{where}: {name} is {_kind(value)}: use text, numbers, lists and objects")


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
