"""Text files: listing and splits."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.listing import files_under
from jaxtrain.data.files.splits import files_of_splits, names_except, split_of
from jaxtrain.data.holdout import check_fraction, share
from jaxtrain.errors import UserError, warn_user
from jaxtrain.records import report_unread

Bytes = NDArray[np.uint8]

_THIRD_PARTY = {"site-packages", "dist-packages", "__pycache__"}
# Some distributions remove these, so that a corpus with them would differ between machines.
_OFTEN_STRIPPED = {"test", "tests", "idle_test", "lib2to3"}
_JSON_LINES = {".jsonl", ".ndjson"}
_REPLACEMENT = "\ufffd"
_PROBED_BYTES = 8 * 1024
_COUNTED_TOKENS = 2**20


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library, sorted by path, without tests.

    Raises:
      UserError: This Python is installed without its sources.

    Example:
      >>> any(path.name == "dataclasses.py" for path in stdlib_files())
      True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in files_under(root, _THIRD_PARTY | _OFTEN_STRIPPED) if f.suffix == ".py"]
    if not files:
        raise UserError(f"{root} has no Python source: use your own text file or folder")
    return files


def text_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return `path` itself, or every text file below it, sorted by path.

    Hidden and empty files are skipped. Other files of a folder that are no text, which cannot be read or have a NUL
    byte in their first 8 KiB, are named in a warning, and so are JSON Lines, which are read as text.

    Raises:
      UserError: `path` does not exist, or there is no text.

    Example:
      >>> [file.name for file in text_files(os.__file__)]
      ['os.py']
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{root} does not exist: use a text file or a folder of text files")
    found = [root] if root.is_file() else [file for file in files_under(root) if file.stat().st_size]
    files = [file for file in found if _is_text(file)]
    if not files:
        raise UserError(f"{root} has no readable text: use a non-empty text file or folder")
    report_unread(root, names_except(found, files, root), what="files")
    if lines := next((file for file in files if file.suffix.lower() in _JSON_LINES), None):
        warn_user(f"{lines} is read as text, with its names and braces: tokenize its texts by jaxtrain data tokenize")
    return files


def warn_of_encoding(file: Path, content: bytes) -> None:
    """Warn of a text file that is not UTF-8, of which a tokenizer sees U+FFFD in place of some characters."""
    text = content.decode("utf-8", "replace")[4:-4]  # a character may be divided at the ends of a part
    if _REPLACEMENT in text and _REPLACEMENT.encode() not in content:
        warn_user(
            f"{file} is not UTF-8, so that some of its characters are lost: convert it, as by iconv -f latin1 -t utf-8"
        )


def split_text(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[Bytes, Bytes]:
    """Return the bytes of text files as (train, validation), uint8 each, split by whole files.

    If the names of all files say a split, as `train.txt` and `valid.txt` do, it is that. Otherwise the validation files
    are those with the smallest hash of their path, so that the split depends on names only. A single file is divided
    instead, validation last.

    Args:
      files: Text files.
      root: Folder that the hashed paths are relative to.
      validation_fraction: Fraction of the files that is held out.

    Raises:
      UserError: The fraction is not in (0, 1), or a part is empty.

    Example:
      >>> train, validation = split_text(text_files(os.__file__), Path(os.__file__).parent)
      >>> 0 < len(validation) < len(train)
      True
    """
    parts = tuple(b"".join(contents) for contents in split_contents(files, root, validation_fraction))
    if not all(parts):
        raise UserError(f"the text in {root} is too short to split into train and validation: use more text")
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def split_contents(
    files: Sequence[Path], root: str | os.PathLike[str], validation_fraction: float = 0.1
) -> tuple[list[bytes], list[bytes]]:
    """Return the contents of every file as (train, validation), split as `split_text` does.

    Raises:
      UserError: The fraction is not in (0, 1).
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
    """Split files into (train, validation), in their order; a single file is for training.

    If the names of all files say a split, as `train.txt` and `valid.txt` do, it is that; otherwise files are held out
    by the hash of their path.

    Raises:
      UserError: The fraction is not in (0, 1).
    """
    check_fraction(validation_fraction)
    named = all(split_of(file.relative_to(root)) for file in files) and files_of_splits(files, Path(root))
    if named:
        report_unread(root, names_except(files, [*named[0], *named[1]], Path(root)), what="files")
        return named
    by_hash = sorted(files, key=lambda file: _path_hash(file.relative_to(root)))
    held_out = set(by_hash[: share(len(files), validation_fraction)])
    return [f for f in files if f not in held_out], [f for f in files if f in held_out]


def unigram_entropy(tokens: NDArray[np.integer[Any]]) -> float:
    """Return the entropy of the tokens in nats per token: the loss of the best model without context.

    Args:
      tokens: int [N].

    Example:
      >>> round(unigram_entropy(np.frombuffer(b"abab", np.uint8)), 6)  # log 2
      0.693147
    """
    # In pieces, because bincount converts its argument to int64.
    size = int(tokens.max(initial=0)) + 1
    counts = np.zeros(size, np.int64)
    for start in range(0, len(tokens), _COUNTED_TOKENS):
        counts += np.bincount(tokens[start : start + _COUNTED_TOKENS], minlength=size)
    p = counts[counts > 0] / len(tokens)
    return float(p @ np.log(1 / p))


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            start = stream.read(_PROBED_BYTES)
    except OSError:
        return False
    return bool(start) and b"\0" not in start


def _path_hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.as_posix())).digest()
