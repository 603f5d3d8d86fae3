"""Tokenize documents once into a memory-mapped file, shared by all processes and by later commands.

The files lie in the user's cache folder, `~/.cache/jaxtrain/tokens` by default. The environment variable
JAXTRAIN_TOKEN_CACHE names another folder, or switches the cache off with "off": tokens are then held in memory. The
least recently used files are removed once all of them take more than `MAX_BYTES`.
"""

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxtrain.errors import UserError
from jaxtrain.user_cache import prune, user_cache

MAX_BYTES = 32 * 2**30
"""Upper bound of the total size of the cached files, but for the file in use."""
VARIABLE = "JAXTRAIN_TOKEN_CACHE"

# A file: header, tokens, padding to eight bytes, offsets.
_MAGIC = b"jaxtrain tokens 1\n"
_HEADER = struct.Struct("<18s6xQQQ")  # magic, bytes per token, tokens, documents


@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as tokens, memory-mapped or in memory. Item `i` is the tokens of document `i`.

    Attributes:
      tokens: Tokens of all documents, one after another, integer [N].
      offsets: Start of each document in `tokens`, and the end of the last one, int64 [documents + 1].

    Example:
      >>> documents = TokenizedDocuments(np.array([1, 2, 3]), np.array([0, 2, 3]))
      >>> len(documents), documents[0].tolist()
      (2, [1, 2])
    """

    tokens: NDArray[np.integer[Any]]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int, /) -> NDArray[np.integer[Any]]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def tokenized(
    key: Iterable[str] | None, documents: Callable[[], Iterable[NDArray[np.integer[Any]]]], dtype: DTypeLike
) -> TokenizedDocuments:
    """Return documents from the cache, or tokenize and store them.

    Several processes may call this at once: one of them tokenizes, the others wait and read its file. Without a usable
    cache folder the tokens are held in memory.

    Args:
      key: Texts that identify the tokenizer and the content of the documents; None bypasses the cache.
      documents: Returns the tokens of each document; called only if they are not in the cache.
      dtype: Unsigned integer dtype to store the tokens in.

    Returns:
      The documents.
    """
    folder = _folder()
    if folder is None or key is None:
        return _in_memory(documents(), dtype)
    digest = hashlib.sha256(b"\0".join(os.fsencode(part) for part in (np.dtype(dtype).str, *key))).hexdigest()
    path = folder / f"{digest}.tokens"
    found = _read(path, dtype)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(path) as stream:
            if stream is not None:
                _write(stream, documents(), np.dtype(dtype))
                _partial(path).replace(path)
        prune(folder, "*.tokens*", MAX_BYTES, protected=path)
        found = _read(path, dtype)
    except OSError:
        found = None
    return _in_memory(documents(), dtype) if found is None else found


def file_identity(file: Path) -> str:
    """Return a text that changes whenever the file's content does: its path, size, times and inode."""
    stat = file.stat()
    return f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _folder() -> Path | None:
    setting = os.environ.get(VARIABLE, "")
    if setting:
        return None if setting == "off" else Path(setting)
    try:
        return user_cache("tokens")
    except UserError:
        return None


def _in_memory(documents: Iterable[NDArray[np.integer[Any]]], dtype: DTypeLike) -> TokenizedDocuments:
    tokens, offsets = bytearray(), [0]  # one buffer that grows, so that all tokens are never in memory twice
    for document in documents:
        tokens += np.ascontiguousarray(document, dtype).data
        offsets.append(offsets[-1] + len(document))
    return TokenizedDocuments(np.frombuffer(tokens, dtype), np.array(offsets, np.int64))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[BinaryIO | None]:
    """Yield a locked, empty file to write, to be renamed to `path`; None if another process has written `path`."""
    partial = _partial(path)
    while True:
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if path.exists():
                # Written while this process waited; the lock may be on a new file that nobody needs.
                if _is_at(stream, partial):
                    partial.unlink()
                yield None
                return
            if not _is_at(stream, partial):
                continue  # renamed or removed by another process meanwhile
            stream.truncate(0)
            try:
                yield stream
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            return


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(stream: BinaryIO, documents: Iterable[NDArray[np.integer[Any]]], dtype: np.dtype[Any]) -> None:
    offsets = [0]
    stream.seek(_HEADER.size)
    for tokens in documents:
        stream.write(np.ascontiguousarray(tokens, dtype).data)
        offsets.append(offsets[-1] + len(tokens))
    stream.write(bytes(-offsets[-1] * dtype.itemsize % 8))
    stream.write(np.array(offsets, np.int64).data)
    stream.seek(0)
    stream.write(_HEADER.pack(_MAGIC, dtype.itemsize, offsets[-1], len(offsets) - 1))
    stream.flush()


def _read(path: Path, dtype: DTypeLike) -> TokenizedDocuments | None:
    """Return the documents of a file, None if there is none; a damaged file is removed."""
    try:
        with path.open("rb") as stream:
            header, size = stream.read(_HEADER.size), os.fstat(stream.fileno()).st_size
            content = np.memmap(stream, np.uint8, mode="r").view(np.ndarray) if size else np.empty(0, np.uint8)
    except OSError:
        return None
    if len(header) == _HEADER.size:
        magic, itemsize, tokens, documents = _HEADER.unpack(header)
        end = _HEADER.size + tokens * itemsize
        begin = end + -tokens * itemsize % 8
        if (magic, itemsize, size) == (_MAGIC, np.dtype(dtype).itemsize, begin + 8 * (documents + 1)):
            with contextlib.suppress(OSError):
                os.utime(path)  # marks the file as used
            return TokenizedDocuments(content[_HEADER.size : end].view(dtype), content[begin:].view(np.int64))
    with contextlib.suppress(OSError):
        path.unlink()
    return None
