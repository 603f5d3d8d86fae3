"""Tokenizers: bytes, or a tokenizer.json of the `tokenizers` library."""

import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxtrain.data.files.listing import check_content
from jaxtrain.errors import UserError
from jaxtrain.folder_files import MOST_BYTES

Tokens = NDArray[np.int32]
Role = Literal["pad", "start", "end", "mask"]

_NAMES: dict[Role, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "start": ("[CLS]", "<s>", "<|im_start|>", "<|begin_of_text|>", "<|endoftext|>"),
    "end": ("[SEP]", "</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names of special tokens in common models, by role."""


class Tokenizer(Protocol):
    """Conversion of text to tokens and back."""

    @property
    def size(self) -> int:
        """Size of the vocabulary."""
        ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`, int32 [N], without special ones."""
        ...

    def encode_file(self, content: bytes) -> NDArray[np.integer[Any]]:
        """Return the tokens [N] of the contents of a file."""
        ...

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of tokens [N], without special ones."""
        ...

    def special(self, role: Role) -> int:
        """Return the special token that pads, starts, ends or masks text. Raises `UserError` if there is none."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, followed by the special tokens for padding, start, end and mask.

    Example:
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("é").tolist(), tokenizer.special("pad"), tokenizer.size
      ([195, 169], 256, 260)
      >>> tokenizer.decode([104, 105, 258, 256])
      'hi'
    """

    size: int = 256 + len(_NAMES)

    def encode(self, text: str) -> Tokens:
        """Return the bytes of `text`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_file(self, content: bytes) -> NDArray[np.uint8]:
        """Return the contents, uint8."""
        return np.frombuffer(content, np.uint8)

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of the bytes; invalid UTF-8 becomes U+FFFD."""
        array = np.asarray(tokens, np.int32)
        return bytes(array[array < 256].astype(np.uint8)).decode("utf-8", "replace")

    def special(self, role: Role) -> int:
        """Return 256 or above."""
        return 256 + list(_NAMES).index(role)


class FileTokenizer:
    """Tokenizer of a tokenizer.json, as Hugging Face models have one.

    Args:
      file: Path of the tokenizer.json.

    Raises:
      UserError: The file cannot be read, or `tokenizers` is not installed.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = Path(file)
        self._tokenizer = _read(self.file)

    def __reduce__(self) -> Any:
        return FileTokenizer, (self.file,)

    @property
    def size(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`, without those a template would add."""
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{self.file} cannot encode {text[:20]!r}… ({error}): fix it") from None

    def encode_file(self, content: bytes) -> Tokens:
        """Return the tokens of the text; invalid UTF-8 becomes U+FFFD."""
        return self.encode(content.decode("utf-8", "replace"))

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of the tokens, without special ones."""
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def known(self, role: Role) -> list[str]:
        """Return the tokens with known names of a role."""
        return [name for name in _NAMES[role] if self._tokenizer.token_to_id(name) is not None]

    def special(self, role: Role) -> int:
        """Return the token with the first known name of the role."""
        for name in self.known(role):
            return int(self._tokenizer.token_to_id(name))
        raise UserError(f"{self.file} has no {role} token: add one of {', '.join(_NAMES[role])}")

    def identity(self) -> list[str]:
        """Return texts that change whenever the tokens of a text may."""
        digest = hashlib.sha256(self.file.read_bytes()).hexdigest()
        return [f"whole texts by tokenizers {importlib.metadata.version('tokenizers')} {digest}"]


def tokenizer(file: Path | None) -> Tokenizer:
    """Return the tokenizer of a file, or of bytes if there is none."""
    return ByteTokenizer() if file is None else FileTokenizer(file)


def _read(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Read
    except ImportError:
        raise UserError("a tokenizer.json needs tokenizers: pip install 'jaxtrain[data]'") from None
    if not file.is_file():
        raise UserError(f"{file} is not a file: use a tokenizer.json")
    check_content(file)
    if (bytes_ := file.stat().st_size) > MOST_BYTES:
        raise UserError(f"{file} has {bytes_:,} bytes, more than {MOST_BYTES:,}: use a tokenizer.json")
    try:
        found = Read.from_file(str(file))
        # A file may hold those of the program that wrote it; texts are encoded as a whole.
        found.no_truncation()
        found.no_padding()
        last = max(found.get_vocab(with_added_tokens=True).values(), default=-1)
    except BaseException as error:  # tokenizers raises Exception itself, and BaseException when its Rust code panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        first = str(error).partition("\n")[0]
        raise UserError(f"{file} is not a readable tokenizer.json ({first}): use another") from None
    # The embedding has this many rows, and JAX would clamp larger tokens to the last.
    if last >= found.get_vocab_size(with_added_tokens=True):
        raise UserError(f"{file} has {found.get_vocab_size()} tokens numbered up to {last}: number them without gaps")
    return found
