"""Text in files: which they are, how they are split, and windows over what they hold."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files import files_under
from jaxtrain.data.holdout import check_fraction, share
from jaxtrain.data.source import Example
from jaxtrain.errors import UserError

Bytes = NDArray[np.uint8]

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
# Distributions strip these, so a corpus with them would differ from one machine to the next.
_OFTEN_STRIPPED = {"test", "tests", "idle_test", "lib2to3"}
_SNIFFED = 8 * 1024  # bytes
_COUNTED = 2**20  # tokens


@dataclass(frozen=True, eq=False)
class Text:
    """Windows of `seq_len` predictions each over a run of tokens, which bytes are.

    Item `i` is `{"tokens": int32[seq_len + 1]}`, starting at token `i * seq_len`: the inputs are `tokens[:-1]`
    and the targets `tokens[1:]`. Neighbours share one token, so every token but the first is a target once; an
    incomplete last window is left out.

    >>> text = Text(np.frombuffer(b"abcdefgh", np.uint8), seq_len=3)
    >>> [bytes(window["tokens"].tolist()) for window in text]
    [b'abcd', b'defg']

    Raises UserError if `seq_len` is below 1 or the text is shorter than one window.
    """

    tokens: NDArray[np.integer[Any]]  # [N]
    seq_len: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UserError(f"seq_len is {self.seq_len}: choose 1 or more")
        if len(self.tokens) <= self.seq_len:
            raise UserError(
                f"the text has {len(self.tokens)} tokens but one window of seq_len {self.seq_len} needs"
                f" {self.seq_len + 1}: give more text or a shorter seq_len"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        return {"tokens": self.tokens[start : start + self.seq_len + 1].astype(np.int32)}


def stdlib_files() -> list[Path]:
    """The sources of the running Python's standard library, sorted by path, without tests.

    >>> any(path.name == "dataclasses.py" for path in stdlib_files())
    True

    Raises UserError if this Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in files_under(root, _NOT_THE_LIBRARY | _OFTEN_STRIPPED) if f.suffix == ".py"]
    if not files:
        raise UserError(f"{root} holds no Python source: give a text file or folder of your own")
    return files


def text_files(path: str | os.PathLike[str]) -> list[Path]:
    """`path` itself, or every text file under it, sorted by path.

    Hidden, empty and unreadable files are passed over, and so are those with a NUL byte in their first 8 KiB.

    >>> [file.name for file in text_files(os.__file__)]
    ['os.py']

    Raises UserError if `path` does not exist or no text is left.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{root} does not exist: give a text file or a folder of text files")
    files = [f for f in ([root] if root.is_file() else files_under(root)) if _is_text(f)]
    if not files:
        raise UserError(f"{root} holds no text that can be read: give a non-empty text file or folder")
    return files


def split_text(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[Bytes, Bytes]:
    """The bytes of `files` as (train, validation), each uint8, split by whole files.

    The files with the smallest hash of their path below `root` are the validation files, so the split depends
    on names alone. A single file is cut in two instead, validation last.

    >>> train, validation = split_text(text_files(os.__file__), Path(os.__file__).parent)
    >>> 0 < len(validation) < len(train)
    True

    Raises UserError if the fraction is not between 0 and 1, or if either part would be empty.
    """
    parts = tuple(b"".join(contents) for contents in split_contents(files, root, validation_fraction))
    if not all(parts):
        raise UserError(f"the text in {root} is too short to split into train and validation: give more text")
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def split_contents(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[list[bytes], list[bytes]]:
    """What the files of `split_text` hold, one by one, as (train, validation).

    Raises UserError if the fraction is not between 0 and 1.
    """
    if len(files) == 1:
        check_fraction(validation_fraction)
        content = files[0].read_bytes()
        cut = len(content) - share(len(content), validation_fraction)
        return [content[:cut]], [content[cut:]]
    train, validation = split_files(files, root, validation_fraction)
    return [file.read_bytes() for file in train], [file.read_bytes() for file in validation]


def split_files(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[list[Path], list[Path]]:
    """`files` as (train, validation), each in their order: the validation files have the smallest hash of their path.

    Raises UserError if the fraction is not between 0 and 1; one file alone is a train file.
    """
    check_fraction(validation_fraction)
    by_hash = sorted(files, key=lambda file: _path_hash(file.relative_to(root)))
    held_out = set(by_hash[: share(len(files), validation_fraction)])
    return [f for f in files if f not in held_out], [f for f in files if f in held_out]


def unigram_entropy(tokens: NDArray[np.integer[Any]]) -> float:
    """The loss, in nats per token, of the best model that ignores context: a line any other model must beat.

    >>> round(unigram_entropy(np.frombuffer(b"abab", np.uint8)), 6)  # log 2
    0.693147
    """
    # In pieces, because bincount converts its argument to int64.
    size = int(tokens.max(initial=0)) + 1
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _COUNTED):
        counts += np.bincount(tokens[start : start + _COUNTED], minlength=size)
    p = counts[counts > 0] / len(tokens)
    return float(p @ np.log(1 / p))


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            start = stream.read(_SNIFFED)
    except OSError:
        return False
    return bool(start) and b"\0" not in start


def _path_hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.as_posix())).digest()
