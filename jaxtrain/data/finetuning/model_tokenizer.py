"""The tokenizer and the chat template of a model's folder."""

import os
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxtrain.data.files.model_folder import inside, read_text
from jaxtrain.data.finetuning.chat_template import ChatTemplate
from jaxtrain.data.finetuning.examples import Message
from jaxtrain.data.finetuning.tokenizer_settings import CONFIG, NAMED, apply_settings, content_of, read_settings
from jaxtrain.data.text.tokenizer import FileTokenizer, Role, Tokens
from jaxtrain.errors import UserError
from jaxtrain.records import Record

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES: dict[Role, tuple[str, ...]] = {
    "pad": ("pad_token", "eos_token"),  # padding is masked, so that any token will do
    "start": ("bos_token",),
    "end": ("eos_token",),
    "mask": ("mask_token",),
}


class ModelTokenizer(FileTokenizer):
    """Tokenizer of a folder in Hugging Face layout, with its special tokens and chat template.

    It reads `tokenizer.json`, the tokens and settings of `tokenizer_config.json` and of the older
    `special_tokens_map.json` and `added_tokens.json`, and the chat template of `chat_template.jinja`,
    `additional_chat_templates/` or `tokenizer_config.json`, in this order, as `transformers` does. No code of the
    folder is run but the template, in a sandbox.

    Args:
      folder: Folder of the model.
      now: The time for templates that write the date; None for the beginning of today.
      template: File of a chat template in place of those of the folder; None for these.

    Attributes:
      special_tokens: Special tokens by name, such as `eos_token`.

    Raises:
      UserError: There is no tokenizer.json, or a file is damaged.

    Example:
      >>> from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
      >>> import json, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
      >>> made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
      >>> _ = made.add_special_tokens(["<|end|>"])
      >>> made.save(f"{folder}/tokenizer.json")
      >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
      >>> config = {"eos_token": "<|end|>", "chat_template": template}
      >>> _ = Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
      >>> texts = ModelTokenizer(folder)
      >>> tokens = texts.encode_chat([{"role": "user", "content": "Hi"}])
      >>> len(tokens), texts.decode_all(tokens)
      (9, 'user: Hi<|end|>')
    """

    def __init__(
        self, folder: str | os.PathLike[str], now: datetime | None = None, template: Path | None = None
    ) -> None:
        self.folder, self.now, self.template = Path(folder), now or datetime.combine(date.today(), time()), template
        if not (self.folder / _TOKENIZER).is_file():
            raise UserError(
                f"{folder} has no {_TOKENIZER}: write one with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        super().__init__(inside(self.folder, _TOKENIZER))
        config = read_settings(self.folder)
        self.special_tokens = {name: _content(config[name], name, self.folder) for name in NAMED if config.get(name)}
        _add_tokens(self._tokenizer, config, self.folder)
        self._size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        sources = _template_sources(self.folder, config) if template is None else _template_file(template)
        self._templates = {
            key: ChatTemplate(source, name, self.special_tokens, self.now) for key, (name, source) in sources.items()
        }
        apply_settings(self._tokenizer, config, self.folder)

    def __reduce__(self) -> Any:
        return ModelTokenizer, (self.folder, self.now, self.template)

    def chat_template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """Return the template of conversations, which may differ for those with tools.

        Raises:
          UserError: The folder has no chat template.
        """
        keys = ("tool_use", "default") if tools is not None else ("default",)
        for key in keys:
            if key in self._templates:
                return self._templates[key]
        raise UserError(
            f"{self.folder} has no chat template, which messages need: add a {_TEMPLATE} there, use --chat-template"
            " FILE, or examples with the texts prompt and completion"
        )

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> Tokens:
        """Return the tokens of a conversation, those of `apply_chat_template` in `transformers`.

        Args:
          messages: Messages of plain JSON values.
          tools: Tools, as JSON Schemas.
          add_generation_prompt: Whether to end with what precedes an answer of the assistant.

        Raises:
          UserError: There is no template, or it refuses the conversation.
        """
        text = self.chat_template(tools).render(messages, tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text)

    def encodings(self, texts: Sequence[str], are_whole: Sequence[bool]) -> list[Any]:
        """Return the `tokenizers.Encoding` of texts, in several threads.

        Args:
          texts: Texts.
          are_whole: Whether each has all its special tokens; the tokenizer puts its own around the others.

        Raises:
          UserError: The tokenizer fails.
        """
        encodings: dict[int, Any] = {}
        for is_whole in (True, False):
            numbers = [i for i in range(len(texts)) if are_whole[i] == is_whole]
            alike = [texts[i] for i in numbers]
            try:
                found = self._tokenizer.encode_batch(alike, add_special_tokens=not is_whole) if alike else []
            except Exception as error:  # tokenizers raises Exception itself
                raise UserError(f"{self.file} cannot encode {alike[0][:20]!r}… ({error}): fix it") from None
            encodings |= zip(numbers, found, strict=True)
        return [encodings[i] for i in range(len(texts))]

    def decode_all(self, tokens: ArrayLike) -> str:
        """Return the text of the tokens, special ones included."""
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))

    def special(self, role: Role) -> int:
        """Return the special token of a role: that of `tokenizer_config.json`, or the only one of a known name.

        Raises:
          UserError: There is none, or several could end a text.
        """
        for name in _ROLES[role]:
            token = self._tokenizer.token_to_id(self.special_tokens.get(name, ""))
            if token is not None:
                return int(token)
        known = self.known(role)
        if role == "end" and len(known) > 1:
            raise UserError(
                f"{self.folder} names no eos_token, which may be {' or '.join(known)}: write it into {CONFIG}"
            )
        return super().special(role)

    @property
    def size(self) -> int:
        """Number of rows that embeddings need: the largest token plus 1, which may exceed the number of tokens."""
        return self._size

    def special_ids(self) -> list[int]:
        """Return the special tokens, which decoded texts do not show."""
        return [i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]

    def ends_in_added_token(self, text: str) -> bool:
        """Return whether a text ends with an added token, such as a special one, and white space."""
        contents = (token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        return text.rstrip().endswith(tuple(contents))

    def identity(self) -> list[str]:
        """Return texts that change whenever the tokens of an example may."""
        added = sorted((i, repr(token)) for i, token in self._tokenizer.get_added_tokens_decoder().items())
        templates = sorted((key, t.source, str(t.now) if t.writes_date else "") for key, t in self._templates.items())
        special = sorted(self.special_tokens.items())
        settings = f"{self._tokenizer.encode_special_tokens} {self._tokenizer.pre_tokenizer}"
        return [*super().identity(), repr(added), repr(templates), repr(special), settings]


def _content(value: Any, name: str, folder: Path) -> str:
    content = content_of(value)
    if not isinstance(content, str):
        raise UserError(f"{folder / CONFIG}: {name} is {content!r}, not text: download it again")
    return content


def _add_tokens(tokenizer: Any, config: Record, folder: Path) -> None:
    """Add the tokens of the configuration that the tokenizer lacks, in the order of `transformers`."""
    more = config.get("additional_special_tokens")
    more = config.get("extra_special_tokens") or more or []
    own = [name for name in dict.keys(config) if name.endswith("_token") and name not in NAMED]
    try:
        listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
        _add(tokenizer, [_added_token(token) for _, token in listed])
        # Special ones are recognized in texts even where the vocabulary alone has them.
        own = [name for name in own if isinstance(dict.get(config, name), str | Mapping)]
        special = [config[name] for name in (*NAMED, *own) if config.get(name)]
        special += more.values() if isinstance(more, Mapping) else more
        _add(tokenizer, [_added_token(token, special=True) for token in special])
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} lists its tokens wrongly ({error}): download it again") from None


def _add(tokenizer: Any, tokens: list[Any]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in tokens if token.content not in known])


def _added_token(value: str | Mapping[str, Any], **flags: bool) -> Any:
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    value.get("__type")  # says that it is a token
    return AddedToken(**{name: value[name] for name in _FLAGS if name in value} | flags)


def _template_file(file: Path) -> dict[str, tuple[str, str]]:
    try:
        return {"default": (str(file), file.read_text("utf-8"))}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}): use a chat template, a text such as {_TEMPLATE}") from None


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the (name for messages, text) of every chat template by its key."""
    sources: dict[str, tuple[str, str]] = {}
    if (folder / _TEMPLATE).is_file():
        sources["default"] = (str(folder / _TEMPLATE), read_text(folder, _TEMPLATE))
    for file in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
        sources[file.stem] = (str(file), read_text(folder, f"{_MORE_TEMPLATES}/{file.name}"))
    if sources:
        return sources
    value, name = config.get("chat_template"), f"chat_template of {folder / CONFIG}"
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": (name, value)}
    try:
        return {entry["name"]: (name, str(entry["template"])) for entry in value}
    except (TypeError, KeyError):
        raise UserError(f"{name} is neither text nor a list of named templates: download it again") from None
