"""Chat templates: conversations as the text that a model was trained on, rendered as `transformers` does.

A template is a program from a folder that is not trusted. It runs in the sandbox of jinja2, without access to files,
modules and attributes with underscores, with bounded time and memory, and its inputs are plain JSON values.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NamedTuple

from jaxtrain.data.finetuning.examples import Message
from jaxtrain.data.finetuning.template_limits import budget, conversation_budget, limited_environment
from jaxtrain.errors import UserError
from jaxtrain.records import Record

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MOST_CHARACTERS = 2 * 10**5  # of a template: known ones have up to 20,000
_PART = re.compile(r"""\.text\b|['"]text['"]""")  # how a template reads a part of a content
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of one field, in the order of preference."""
_recording: ContextVar["_Recording | None"] = ContextVar("recording", default=None)


class Span(NamedTuple):
    """Characters `start` to `stop` of a text."""

    start: int
    stop: int


class _Recording:
    """What a template has rendered so far, and its generation blocks."""

    def __init__(self) -> None:
        self.chunks: list[str] = []
        self.length = 0
        self.spans: list[Span] = []

    def add(self, chunk: str) -> None:
        """Add the next part of the text."""
        self.chunks.append(chunk)
        self.length += len(chunk)


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: Text of the template.
      name: Where it is from, for messages.
      variables: Values that the template may use, such as `bos_token`.
      now: The time of `strftime_now`. A template that writes the date then renders the same text in every process and
        after every resumption.

    Raises:
      UserError: The template is not valid, or jinja2 is not installed.

    Example:
      >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
      >>> template = ChatTemplate(source, "chat_template.jinja", {}, datetime(2026, 1, 1))
      >>> template.render([{"role": "user", "content": "Hi"}])
      '<user>Hi'
    """

    def __init__(self, source: str, name: str, variables: Mapping[str, Any], now: datetime) -> None:
        self.source, self.name, self.variables, self.now = source, name, dict(variables), now
        self._compiled = _compile(source, name, now)
        self._reads: set[tuple[Any, ...]] | None = None

    def recording(self) -> "ChatTemplate":
        """Return the same template, which notes what it reads of the conversations that it renders."""
        made = copy.copy(self)
        made._reads = set()
        return made

    def record(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Record:
        """Return `{"messages": …, "tools": …}` as the template gets them, with the fields that it has read so far."""
        listed = None if tools is None else list(tools)
        return Record({"messages": [self._given(message) for message in messages], "tools": listed}, self._reads)

    def note_reasoning(self, number: int) -> None:
        """Note that the reasoning of the message `number` is written beside the template."""
        if self._reads is not None:
            self._reads |= {("messages", number, name) for name in REASONING}

    def __reduce__(self) -> Any:
        return ChatTemplate, (self.source, self.name, self.variables, self.now)

    @property
    def marks_generation(self) -> bool:
        """Whether the template has `{% generation %}` blocks, which mark what the assistant writes."""
        return bool(_GENERATION.search(self.source))

    @property
    def writes_date(self) -> bool:
        """Whether the text may depend on the date."""
        return "strftime_now" in self.source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation.

        Args:
          messages: Messages of plain JSON values.
          tools: Tools, as JSON Schemas.
          add_generation_prompt: Whether to end with what precedes an answer of the assistant.

        Raises:
          UserError: The template refuses the conversation, or fails.
        """
        text, _ = self.render_spans(messages, tools, add_generation_prompt=add_generation_prompt)
        return text

    def render_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation as by `render`, and the spans of its generation blocks."""
        recording, given = _Recording(), self.record(messages, tools)
        tokens = _recording.set(recording), budget.set(conversation_budget(messages, tools))
        try:
            chunks = self._compiled.generate(
                **self.variables,
                messages=given["messages"],
                tools=given["tools"],
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            for chunk in chunks:
                recording.add(chunk)
        except Exception as error:  # a template can fail as any program can
            why = _without_records(str(error).partition("\n")[0]) or type(error).__name__
            raise UserError(
                f"{self.name} does not render the conversation ({why}): change the messages, or the template"
            ) from None
        finally:
            _recording.reset(tokens[0])
            budget.reset(tokens[1])
        return "".join(recording.chunks), recording.spans

    def _given(self, message: Message) -> Message:
        """Return a message with its reasoning under the names that templates read, and its content in a form they do.

        Its weight is no part of the text.
        """
        reasoning, content = reasoning_of(message), message.get("content")
        given = {name: value for name, value in message.items() if name != "weight"}
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        # A template that does not read parts would write them as Python does.
        if isinstance(content, list) and not _PART.search(self.source) and all(map(_is_text, content)):
            given["content"] = "".join(part["text"] for part in content)
        return given


def reasoning_of(message: Message) -> Any:
    """Return the reasoning in a field of its own; None if there is none."""
    return next((message[name] for name in REASONING if message.get(name) is not None), None)


def _without_records(message: str) -> str:
    """Return a message with the type that a template's author knows."""
    return message.replace(f"{Record.__module__}.{Record.__name__} object", "dict object").replace(
        f'"{Record.__name__}"', '"dict"'
    )


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _compile(source: str, name: str, now: datetime) -> Any:
    try:
        import jinja2
        from jinja2.ext import loopcontrols
    except ImportError:
        raise UserError("chat templates need jinja2: pip install 'jaxtrain[run]'") from None
    if len(source) > _MOST_CHARACTERS:
        raise UserError(f"{name} has {len(source):,} characters, more than {_MOST_CHARACTERS:,}: use a chat template")
    environment = limited_environment(
        {"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), loopcontrols],
    )
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": now.strftime,
        "namespace": _namespace_type(),
        "dict": _NewDict(),
    }
    try:
        return environment.from_string(source)
    except Exception as error:  # Python's compiler has limits of its own
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UserError(f"{name}{line} is not a valid chat template ({error}): fix it") from None


def _generation_extension() -> type:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """The blocks `{% generation %}…{% endgeneration %}`, which record where their text is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("record"), [], [], body).set_lineno(line)

        def record(self, caller: Callable[[], str]) -> str:
            text = caller()
            recording = _recording.get()
            if recording is not None:
                start = recording.length
                recording.spans.append(Span(start, start + len(text)))
            return text

    return Generation


def _namespace_type() -> type:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the attribute {name!r} of a namespace starts with an underscore")

    class PublicNamespace(Namespace):
        """A namespace that refuses attributes with underscores, which would reach Python's internals."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *positional = args
            attributes = dict(*positional, **values)
            for name in attributes:
                check(name)
            Namespace.__init__(self, attributes)

        def __repr__(self) -> str:
            return "<Namespace>"

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return PublicNamespace


class _NewDict:
    """The function `dict` without the attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dict of the keys."""
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON that is not escaped for HTML, unlike that of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
