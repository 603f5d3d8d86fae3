"""Tokenization of corpora into shards, by several processes, which continues after it was interrupted.

The documents are divided into pieces. A piece is written by one process, as one shard or a few, and then recorded in a
file of its own; what is recorded is not done again. The manifest, which makes the folder a corpus, is written last.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.corpus.corpus_documents import CorpusPart, corpus_identity, corpus_parts
from jaxtrain.data.corpus.corpus_manifest import (
    BYTES,
    MANIFEST,
    Manifest,
    ShardEntry,
    read_manifest,
    tokenizer_digest,
    write_json,
    write_manifest,
)
from jaxtrain.data.holdout import check_fraction
from jaxtrain.data.shards.shard import SUFFIX, whole_file, write_shard
from jaxtrain.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jaxtrain.errors import UserError

SHARD_TOKENS = 2**26
TOKENIZER = "tokenizer.json"
_PROGRESS = ".progress"
_BYTES_PER_TOKEN = 4  # of English text with a vocabulary of tens of thousands


class _Piece(NamedTuple):
    """Documents `start` to `stop` of a part of the corpora."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Job:
    """What is to be tokenized into a folder; a process makes its own copy of it."""

    paths: tuple[Path, ...]
    texts: Tokenizer
    out: Path
    shard_tokens: int
    column: str
    validation_fraction: float

    @cached_property
    def parts(self) -> list[CorpusPart]:
        return [part for path in self.paths for part in corpus_parts(path, self.column, self.validation_fraction)]

    @cached_property
    def pieces(self) -> list[_Piece]:
        size = self.shard_tokens * _BYTES_PER_TOKEN
        return [
            _Piece(i, start, stop) for i, part in enumerate(self.parts) for start, stop in part.documents.pieces(size)
        ]

    @cached_property
    def end(self) -> int | None:
        """The token at the end of every document; bytes have none, so that 256 tokens suffice."""
        if isinstance(self.texts, ByteTokenizer):
            return None
        try:
            return self.texts.special("end")
        except UserError:
            return None

    @property
    def vocabulary(self) -> int:
        return BYTES if isinstance(self.texts, ByteTokenizer) else self.texts.size

    def digest(self) -> str:
        """Return a text that changes whenever the tokens or their division into shards may."""
        own = (tokenizer_digest(self.texts), self.end, self.shard_tokens, self.column, self.validation_fraction)
        files = [identity for path in self.paths for identity in corpus_identity(path)]
        return hashlib.sha256(json.dumps([*own, *files]).encode()).hexdigest()

    def record(self, number: int) -> Path:
        return self.out / _PROGRESS / f"{number}.json"

    def write(self, number: int) -> None:
        """Tokenize a piece into shards, and record them."""
        part, start, stop = self.pieces[number]
        split, documents = self.parts[part]
        dtype = np.min_scalar_type(self.vocabulary - 1)
        ending = np.array([] if self.end is None else [self.end], dtype)
        entries: list[ShardEntry] = []
        held, size = list[NDArray[np.integer[Any]]](), 0
        for i in range(start, stop):
            if len(tokens := documents.encode(i, self.texts)):
                held.append(np.append(tokens.astype(dtype), ending))
                size += len(held[-1])
            if size >= self.shard_tokens or (i == stop - 1 and held):
                name = f"{split}-{number:05}-{len(entries):03}{SUFFIX}"
                with whole_file(self.out / name) as stream:
                    write_shard(stream, held, dtype, metadata={"tokenizer": tokenizer_digest(self.texts)})
                entries.append(ShardEntry(name, size, len(held)))
                held, size = [], 0
        write_json(self.record(number), entries)


def tokenize_corpus(
    paths: Sequence[str | os.PathLike[str]],
    texts: Tokenizer,
    out: str | os.PathLike[str],
    *,
    shard_tokens: int = SHARD_TOKENS,
    column: str = "text",
    validation_fraction: float = 0.1,
    workers: int = 1,
    message: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Tokenize corpora into a folder of shards, which `TokenCorpus` and the setting `data` of a recipe read.

    The same call continues a tokenization that was interrupted, and does nothing if it is complete. The end token of
    the tokenizer, if it has one, is appended to every document. The documents are split into train and validation as
    the recipes split text files and tables. Sequences of tokens do not depend on the size of the shards.

    Args:
      paths: Text files or folders of them, one document each; JSON Lines or tables, one document a row.
      texts: Tokenizer of bytes or of a tokenizer.json, which is copied into the folder.
      out: Folder to create.
      shard_tokens: Number of tokens after which a shard ends.
      column: Column of the texts in tables and JSON Lines.
      validation_fraction: Fraction of the documents that is held out.
      workers: Number of processes that tokenize; 1 is this process. A script that uses more needs the usual
        `if __name__ == "__main__":`.
      message: Prints one line, such as how much is done.

    Returns:
      The manifest of the folder.

    Raises:
      UserError: A corpus has no text, an argument is out of range, or the folder contains something else.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("one", "two", "six"):
      ...         _ = Path(folder, f"{name}.txt").write_text(name)
      ...     manifest = tokenize_corpus([folder], ByteTokenizer(), Path(folder, "tokens"), shard_tokens=3)
      >>> manifest.train[0], len(manifest.train), len(manifest.validation)
      (ShardEntry(file='train-00000-000.safetensors', tokens=3, documents=1), 2, 1)
    """
    check_fraction(validation_fraction)
    for name, value in (("shard_tokens", shard_tokens), ("workers", workers), ("corpora", len(paths))):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    job = _Job(tuple(map(Path, paths)), texts, Path(out), shard_tokens, column, validation_fraction)
    digest = job.digest()
    if (job.out / MANIFEST).exists():
        manifest = read_manifest(job.out)
        if manifest.digest != digest:
            raise UserError(f"{out} has the tokens of other corpora or settings: use another folder")
        return manifest
    with _progress(job.out, digest):
        missing = [number for number in range(len(job.pieces)) if not job.record(number).exists()]
        done = len(job.pieces) - len(missing)
        if done:
            message(f"{done} of {len(job.pieces)} pieces are done already")
        for _ in _written(job, missing, min(workers, len(missing))):
            done += 1
            message(f"{done} of {len(job.pieces)} pieces")
        manifest = _manifest(job, digest)
        if isinstance(texts, FileTokenizer):
            shutil.copyfile(texts.file, job.out / TOKENIZER)
        write_manifest(job.out, manifest)
    shutil.rmtree(job.out / _PROGRESS)
    return manifest


def _manifest(job: _Job, digest: str) -> Manifest:
    shards: dict[str, list[ShardEntry]] = {"train": [], "validation": []}
    for number, piece in enumerate(job.pieces):
        split = job.parts[piece.part].split
        shards[split] += [ShardEntry(*entry) for entry in json.loads(job.record(number).read_text())]
    splits = {split: tuple(entries) for split, entries in shards.items()}
    return Manifest(tokenizer_digest(job.texts), job.vocabulary, job.end, digest, **splits)


@contextmanager
def _progress(out: Path, digest: str) -> Iterator[None]:
    """Create the folder, or continue in it, as the only process that does."""
    progress = out / _PROGRESS
    if out.exists() and any(out.iterdir()) and not progress.exists():
        raise UserError(f"{out} is not empty: use another folder")
    progress.mkdir(parents=True, exist_ok=True)
    with (progress / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process tokenizes into {out}: wait for it, or use another folder") from None
        started = progress / "digest"
        if started.exists() and started.read_text() != digest:
            raise UserError(
                f"{out} has a part of the tokens of other corpora or settings: remove it, or use another folder"
            )
        started.write_text(digest)
        for partial in (*out.glob("*.partial"), *progress.glob("*.partial")):
            partial.unlink()
        yield


def _written(job: _Job, numbers: Sequence[int], workers: int) -> Iterator[int]:
    """Yield the number of each piece once it is written."""
    if workers <= 1:
        for number in numbers:
            job.write(number)
            yield number
        return
    spawn = multiprocessing.get_context("spawn")  # threads, as those of tokenizers, do not survive a fork
    with ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=(job,)) as pool:
        written = {pool.submit(_write, number): number for number in numbers}
        try:
            for future in as_completed(written):
                future.result()
                yield written[future]
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(job: _Job) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(number: int) -> None:
    _job.write(number)


_job: _Job  # of a worker process
