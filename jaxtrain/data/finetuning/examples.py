"""The four kinds of examples to fine-tune on, recognized by the names of their fields.

| kind | fields |
| --- | --- |
| `Preference` | `chosen` and `rejected`, and `prompt` if these do not contain it |
| `Conversation` | `messages`, or ShareGPT's `conversations` |
| `Completion` | `prompt` or `question`, and `completion`, `response` or `answer` |
| `PlainText` | `text` |

A row that has the fields of several kinds is of the first of them. Prompts, completions and preferences are texts or
messages. A message is `{"role": …, "content": …}`, or ShareGPT's `{"from": …, "value": …}`; other fields of a
message, such as `tool_calls`, are passed to the chat template, except `weight` (0 or 1) and `train`, `training` or
`loss` (true or false), which tell whether an answer is in the loss. The field `system` is the text of a system message
before the others, `tools` lists the tools of a conversation, as JSON Schemas or as their JSON, and `weight` is the
weight of an example in the loss, a number of at least 0, 1 if it is missing. A field that is null counts as missing.

Other fields that change what is learned are refused. The rest are in `unread`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from jaxtrain.errors import UserError
from jaxtrain.records import Record, unread_fields

Message: TypeAlias = dict[str, Any]
"""Type of a message: `{"role": …, "content": …}`, and what else the chat template reads."""
Messages: TypeAlias = tuple[Message, ...]

_PROMPTS, _COMPLETIONS = ("prompt", "question"), ("completion", "response", "answer")
_CONVERSATIONS = ("messages", "conversations")
# Names of roles in files of ShareGPT, which has no specification, in its descendants and of other models.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "chatbot": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "function-response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
_SHAREGPT = {"from": "role", "value": "content"}
_SYSTEM = ("system", "system_prompt")
_IN_LOSS = ("weight", "train", "training", "loss")  # of OpenAI and Mistral, of Axolotl, and of ms-swift

# Fields that change what is learned, with the remedy.
_ONLY_TEXT = "only text is learned, so leave such examples out"
_INTO_PROMPT = "write it into the prompt, and remove the field"
_TO_TEMPLATE = "it is not passed to the chat template, so remove the field"
_REFUSED = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _ONLY_TEXT),
    **dict.fromkeys(("documents", "chat_template_kwargs"), _TO_TEMPLATE),
    "history": "write the earlier turns as messages",
    "functions": "it is the older form of tools, so write it as tools",
    "function_call": "it is the older form of tool_calls, so write messages with these",
}
_REFUSED_BESIDE_TEXTS = dict.fromkeys(("context", "input", "instruction", *_SYSTEM), _INTO_PROMPT)
_NO_LABELS = (
    "answers are learned whatever their label, so keep the good ones and remove the field, or train a classifier by"
    " --loss classification"
)
_REFUSED_BESIDE_ANSWERS = dict.fromkeys(("label", "kto_tag"), _NO_LABELS)
_REFUSED_BESIDE_PREFERENCES = {"margin": "margins are not supported, so remove the field"}
_REFUSED_IN_MESSAGES = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _ONLY_TEXT),
    **dict.fromkeys(
        ("train_detail", "training_detail", "loss_scale"), "answers are in the loss as a whole, so remove it"
    ),
    "function_call": "it is the older form of tool_calls, so write these",
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
      unread: Names of the fields of the row that are not read.
    """

    sides: ClassVar[int] = 1
    continues: ClassVar[bool] = True

    text: str
    where: str
    weight: float = 1.0
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, which alone is in the loss: both texts, or both messages.

    Attributes:
      prompt: Text or messages before the completion.
      completion: Text or messages to learn.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      weight: Weight in the loss.
      unread: Names of the fields of the row that are not read.
    """

    sides: ClassVar[int] = 1
    continues: ClassVar[bool] = False

    prompt: str | Messages
    completion: str | Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Conversation:
    """A conversation: the messages of the assistant are in the loss.

    Attributes:
      messages: The messages.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      weight: Weight in the loss.
      unread: Names of the fields of the row that are not read.
    """

    sides: ClassVar[int] = 1
    continues: ClassVar[bool] = False

    messages: Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0
    unread: tuple[str, ...] = field(default=(), compare=False)


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
      unread: Names of the fields of the row that are not read.
    """

    sides: ClassVar[int] = 2
    continues: ClassVar[bool] = False

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[Any] | None
    where: str
    weight: float = 1.0
    unread: tuple[str, ...] = field(default=(), compare=False)


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
    try:
        fields = Record({name: value for name, value in row.items() if value is not None})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    example = _example(fields, where)
    is_text = not isinstance(example, Conversation | PlainText) and isinstance(example.prompt, str)
    refused = {
        **_REFUSED,
        **(_REFUSED_BESIDE_TEXTS if is_text else {}),
        **({} if isinstance(example, PlainText) else _REFUSED_BESIDE_ANSWERS),
        **(_REFUSED_BESIDE_PREFERENCES if isinstance(example, Preference) else {}),
    }
    _refuse(fields, refused, where)
    if fields.get("tools") and (is_text or isinstance(example, PlainText)):
        raise UserError(f"{where} has tools beside texts: write messages, which the chat template renders with them")
    weight = _weight(fields.get("weight", 1.0), where)
    return replace(example, weight=weight, unread=tuple(unread_fields(fields)))


def _example(fields: Record, where: str) -> FineTuningExample:
    prompt, completion, conversation = (
        next((name for name in names if name in fields), None) for names in (_PROMPTS, _COMPLETIONS, _CONVERSATIONS)
    )
    tools = _tools(fields.get("tools"), where)
    if "chosen" in fields and "rejected" in fields:
        return _preference(fields, None if prompt is None else fields[prompt], tools, where)
    if conversation is not None:
        messages = _messages(fields[conversation], conversation, where)
        return Conversation(_with_system(messages, fields, where), tools, where)
    if prompt is not None and completion is not None:
        start, end = (_text_or_messages(fields[name], name, where) for name in (prompt, completion))
        _check_alike([start, end], f"{prompt} and {completion}", where)
        return Completion(start if isinstance(start, str) else _with_system(start, fields, where), end, tools, where)
    if "text" in fields:
        return PlainText(_text(fields["text"], "text", where), where)
    raise UserError(
        f"{where} has only the fields {', '.join(fields) or 'of no value'}: name them text; prompt and completion;"
        " messages; or prompt, chosen and rejected"
    )


def _refuse(fields: Record, refused: Mapping[str, str], where: str) -> None:
    for name, remedy in refused.items():
        value = fields.get(name)
        if value is not None and (isinstance(value, bool | int) or value):
            raise UserError(f"{where} has the field {name}: {remedy}")


def _with_system(messages: Messages, fields: Record, where: str) -> Messages:
    """Return messages after the system message that a field of the row gives."""
    name = next((name for name in _SYSTEM if fields.get(name)), None)
    if name is None:
        return messages
    system = {"role": "system", "content": _text(fields[name], name, where)}
    if messages[0]["role"] != "system":
        return (system, *messages)
    if messages[0] != system:
        raise UserError(f"{where} has the field {name} and another system message: keep one")
    return messages


def _preference(fields: Record, prompt: Any, tools: list[Any] | None, where: str) -> Preference:
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
    start, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not (chosen and rejected):
        raise UserError(f"{where}: {_ALIKE}")
    start = _with_prompt(start, prompt, where)
    return Preference(_with_system(start, fields, where), chosen, rejected, tools, where)


def _with_prompt(shared: Messages, prompt: Any, where: str) -> Messages:
    """Return the messages before two answers: those that both have in common, after the prompt if they lack it."""
    if prompt is None and shared:
        return shared
    if isinstance(prompt, str):
        start: Messages = ({"role": "user", "content": _text(prompt, "prompt", where)},)
        # UltraFeedback repeats the question as a text.
        if any(message["content"] == prompt for message in shared if message["role"] == "user"):
            return shared
    else:
        start = _messages(prompt, "prompt", where)
    if shared[: len(start)] == start:
        return shared
    if shared and start[len(start) - len(shared) :] == shared:
        return start
    if shared and shared[0]["role"] != "assistant":
        raise UserError(f"{where}: chosen and rejected begin with other messages than prompt: keep one of both")
    return (*start, *shared)


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
        what = "empty" if isinstance(value, list) else _kind(value)
        raise UserError(f"{where}: {name} is {what}: {_FORM}")
    of = "" if name in _CONVERSATIONS else f" of {name}"
    return tuple(_message(item, f"{where}: message {number}{of}") for number, item in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {_kind(value)}: {_FORM}")
    message = {name: _json(item, name, where) for name, item in value.items() if item is not None}
    for theirs, name in _SHAREGPT.items():
        if theirs in message and message.get(name, message[theirs]) != message[theirs]:
            raise UserError(f"{where} has both {name} and {theirs}, which differ: keep one")
    if "from" in message or "role" not in message:
        message |= {name: message.pop(theirs) for theirs, name in _SHAREGPT.items() if theirs in message}
    if not isinstance(message.get("role"), str):
        raise UserError(f"{where} has no role: {_FORM}")
    name = message["role"].strip().lower()
    role = _ROLES.get(name, name)
    if role not in _KNOWN_ROLES:
        raise UserError(f"{where} has the unknown role {message['role']}: use system, user, assistant or tool")
    message["role"] = role
    _refuse(Record(message), _REFUSED_IN_MESSAGES, where)
    content = message.get("content")
    # An assistant that calls tools may say nothing.
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise UserError(f"{where} has no content that is text: {_FORM}")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where} has a part of the type {kind}: only texts are learned, write the content as one")
    return _in_loss(message, where)


def _in_loss(message: Message, where: str) -> Message:
    """Return a message with the weight 0 if it is an answer that is not in the loss, and no weight otherwise."""
    given = {name: message.pop(name) for name in _IN_LOSS if name in message}
    for name, value in given.items():
        if value not in (0, 1) or (name != "weight" and not isinstance(value, bool)):
            raise UserError(f"{where}: {name} is {value!r}: an answer is in the loss or not, write 1 or 0")
        if value and name != "weight" and message["role"] != "assistant":
            raise UserError(
                f"{where}: {name} is true for the role {message['role']}: only answers are learned, remove it"
            )
    if len({bool(value) for value in given.values()}) > 1:
        raise UserError(f"{where}: {' and '.join(given)} contradict each other: keep one")
    is_left_out = message["role"] == "assistant" and not all(given.values())
    return {**message, "weight": 0} if is_left_out else message


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
    return "missing" if value is None else f"of type {'dict' if isinstance(value, dict) else type(value).__name__}"
