"""Text to tokens and back: bytes, or a tokenizer.json of the `tokenizers` library."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxtrain.errors import UserError

Tokens = NDArray[np.int32]
Role = Literal["pad", "start", "end", "mask"]

_NAMES: dict[Role, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "start": ("[CLS]", "<s>", "<|im_start|>", "<|begin_of_text|>", "<|endoftext|>"),
    "end": ("[SEP]", "</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}
"""What models call the tokens that stand for no text."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    def encode(self, text: str) -> Tokens:
        """The tokens of `text`, int32 [N], with none that stand for no text."""
        ...

    def encode_file(self, content: bytes) -> NDArray[np.integer[Any]]:
        """The tokens [N] of what a file holds."""
        ...

    def decode(self, tokens: ArrayLike) -> str:
        """The text of tokens [N], without those that stand for none."""
        ...

    def special(self, role: Role) -> int:
        """The token that fills up, starts, ends or hides text. Raises `UserError` where there is none."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8, then the tokens that fill up, start, end and hide text.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é").tolist(), tokenizer.special("pad"), tokenizer.size
    ([195, 169], 256, 260)
    >>> tokenizer.decode([104, 105, 258, 256])
    'hi'
    """

    size: int = 256 + len(_NAMES)

    def encode(self, text: str) -> Tokens:
        """The bytes of `text`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_file(self, content: bytes) -> NDArray[np.uint8]:
        """Its bytes, uint8, whatever they are."""
        return np.frombuffer(content, np.uint8)

    def decode(self, tokens: ArrayLike) -> str:
        """The text of the bytes; what is no UTF-8 becomes U+FFFD."""
        array = np.asarray(tokens, np.int32)
        return bytes(array[array < 256].astype(np.uint8)).decode("utf-8", "replace")

    def special(self, role: Role) -> int:
        """256 and on."""
        return 256 + list(_NAMES).index(role)


class FileTokenizer:
    """A tokenizer.json, as Hugging Face's models bring one.

    Raises UserError if the file cannot be read or `tokenizers` is missing.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = Path(file)
        self._tokenizer = _read(self.file)

    def __reduce__(self) -> Any:
        return FileTokenizer, (self.file,)

    @property
    def size(self) -> int:
        """How many tokens there are, those added to the vocabulary included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Tokens:
        """The tokens of `text`, without those a template would put around it."""
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{self.file} cannot take {text[:20]!r}… to tokens ({error}): mend it") from None

    def encode_file(self, content: bytes) -> Tokens:
        """The tokens of its text; what is no UTF-8 becomes U+FFFD."""
        return self.encode(content.decode("utf-8", "replace"))

    def decode(self, tokens: ArrayLike) -> str:
        """The text of the tokens, without special ones."""
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def special(self, role: Role) -> int:
        """The token of the names that models have for it."""
        for name in _NAMES[role]:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return int(token)
        raise UserError(f"{self.file} has no token to {role} text, none of {', '.join(_NAMES[role])}: add one to it")


def tokenizer(file: Path | None) -> Tokenizer:
    """That of the file, or of bytes."""
    return ByteTokenizer() if file is None else FileTokenizer(file)


def _read(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Read
    except ImportError:
        raise UserError("a tokenizer.json needs tokenizers: pip install 'jaxtrain[data]'") from None
    if not file.is_file():
        raise UserError(f"{file} is not a file: give a tokenizer.json")
    try:
        found = Read.from_file(str(file))
        last = max(found.get_vocab(with_added_tokens=True).values(), default=-1)
    except BaseException as error:  # tokenizers raises Exception itself, and where its Rust panics a BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        first = str(error).partition("\n")[0]
        raise UserError(f"{file} is not a tokenizer.json that can be read ({first}): give one") from None
    # A model has as many rows of its embedding, and JAX takes the last one for any beyond.
    if last >= found.get_vocab_size(with_added_tokens=True):
        raise UserError(f"{file} numbers {found.get_vocab_size()} tokens up to {last}: number them without gaps")
    return found
