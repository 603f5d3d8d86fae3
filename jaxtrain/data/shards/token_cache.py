"""Tokenize documents once into a memory-mapped file, shared by all processes and by later commands.

The files lie in the user's cache folder, `~/.cache/jaxtrain/tokens` by default. The environment variable
JAXTRAIN_TOKEN_CACHE names another folder, or switches the cache off with "off": tokens are then held in memory. The
least recently used files are removed once all of them take more than `MAX_BYTES`.
"""

import contextlib
import fcntl
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxtrain.data.shards.shard import SUFFIX, TokenizedDocuments, open_shard, read_shard, write_shard
from jaxtrain.errors import UserError
from jaxtrain.user_cache import prune, user_cache

MAX_BYTES = 32 * 2**30
"""Upper bound of the total size of the cached files, but for the file in use."""
VARIABLE = "JAXTRAIN_TOKEN_CACHE"


def tokenized(
    key: Iterable[str] | None,
    documents: Callable[[], Iterable[NDArray[np.integer[Any]]]],
    dtype: DTypeLike,
    beside: Callable[[], Mapping[str, NDArray[Any]]] = dict,
) -> TokenizedDocuments:
    """Return documents from the cache, or tokenize and store them.

    Several processes may call this at once: one of them tokenizes, the others wait and read its file. Without a usable
    cache folder the tokens are held in memory.

    Args:
      key: Texts that identify the tokenizer and the content of the documents; None bypasses the cache.
      documents: Returns the tokens of each document; called only if they are not in the cache.
      dtype: Unsigned integer dtype to store the tokens in.
      beside: As that of `write_shard`.

    Returns:
      The documents.
    """
    folder = _folder()
    if folder is None or key is None:
        return _in_memory(documents(), dtype, beside)
    digest = hashlib.sha256(b"\0".join(os.fsencode(part) for part in (np.dtype(dtype).str, *key))).hexdigest()
    path = folder / f"{digest}.tokens{SUFFIX}"
    found = _read(path)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(path) as stream:
            if stream is not None:
                write_shard(stream, documents(), dtype, beside)
                _partial(path).replace(path)
        prune(folder, "*.tokens*", MAX_BYTES, protected=path)
        found = _read(path)
    except OSError:
        found = None
    return _in_memory(documents(), dtype, beside) if found is None else found


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


def _in_memory(
    documents: Iterable[NDArray[np.integer[Any]]], dtype: DTypeLike, beside: Callable[[], Mapping[str, NDArray[Any]]]
) -> TokenizedDocuments:
    stream = io.BytesIO()  # one buffer that grows, so that all tokens are never in memory twice
    write_shard(stream, documents, dtype, beside)
    return read_shard(stream.getbuffer())[0]


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


def _read(path: Path) -> TokenizedDocuments | None:
    """Return the documents of a file, None if there is none; a damaged file is removed."""
    if not path.exists():
        return None
    try:
        documents = open_shard(path).documents
    except UserError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks the file as used
    return documents
