"""What a chat template reads of a conversation: fields that it does not read are refused or named.

A template that skips a message, a call of a tool or the tools makes a text without them, and `transformers` says
nothing. Here the fields are counted that the template looked up while it rendered.
"""

from collections.abc import Sequence
from typing import Any

from jaxtrain.data.finetuning.chat_template import REASONING, ChatTemplate
from jaxtrain.data.finetuning.examples import Message
from jaxtrain.errors import UserError
from jaxtrain.records import is_unread, unread_fields


def unread_of(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the names of the fields that a template has not read in all texts that it rendered of a conversation.

    Args:
      template: The template, `recording` while it rendered.
      messages: The messages.
      tools: The tools.

    Raises:
      UserError: It has not read the content or the tool calls of a message, the reasoning of any, or the tools.

    Example:
      >>> from datetime import datetime
      >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
      >>> template = ChatTemplate(source, "chat_template.jinja", {}, datetime(2026, 1, 1)).recording()
      >>> messages = [{"role": "user", "content": "Hi", "name": "Ada"}]
      >>> template.render(messages), unread_of(template, messages, None)
      ('<user>Hi', ('messages.name',))
    """
    record = template.record(messages, tools)
    given = record["messages"]
    for number, (message, own) in enumerate(zip(messages, given, strict=True), 1):
        for name in ("content", "tool_calls"):
            if message.get(name) and is_unread(own, name):
                raise UserError(
                    f"{template.name} does not write {name} of message {number}, of the role {message['role']}: use"
                    " another --chat-template, or leave the message out"
                )
    thoughts = [own for own in given if "reasoning_content" in own]
    if thoughts and all(is_unread(own, name) for own in thoughts for name in REASONING if name in own):
        name = next(name for name in REASONING for message in messages if message.get(name) is not None)
        raise UserError(f"{template.name} does not write {name}: use another --chat-template, or remove the field")
    if tools and all(is_unread(tool, name) for tool in record["tools"] for name in dict.keys(tool)):
        raise UserError(f"{template.name} does not write tools: use another --chat-template, or remove the field")
    known = {f"messages.{name}" for name in (*REASONING, "content", "tool_calls")}
    return tuple(name for name in unread_fields(record) if name not in known)
