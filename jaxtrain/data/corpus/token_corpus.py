"""The tokens of a corpus as one sequence over its shards, which are mapped on use."""

import mmap
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from os import PathLike, scandir
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.corpus.corpus_manifest import ShardEntry, read_manifest, tokenizer_digest
from jaxtrain.data.shards.shard import REMEDY, MappedShard, open_shard
from jaxtrain.data.text.tokenizer import Tokenizer
from jaxtrain.errors import UserError

Split = Literal["train", "validation"]

_OPEN_SHARDS = 64  # each holds a file descriptor, of which a process on macOS has 256


class _Piece(NamedTuple):
    """Tokens `first` to `last` of a shard."""

    file: str
    mapped: MappedShard
    first: int
    last: int


class TokenCorpus:
    """Tokens of a corpus that `tokenize_corpus` wrote, memory-mapped: its documents as one sequence.

    Opening reads the manifest and the names of the files; a shard is mapped on the first use, and at most 64 stay
    mapped. A token is found by arithmetic, however many shards there are.

    Args:
      folder: Folder of the corpus.
      split: "train" or "validation".
      texts: Tokenizer that the tokens must be of; None accepts any.

    Attributes:
      tokens: Number of tokens.
      documents: Number of documents.
      vocabulary: Number of different tokens that there may be.

    Raises:
      UserError: The folder is not a corpus, a shard is missing, or the tokens are of another tokenizer. On access, if a
        shard is cut off or damaged.

    Example:
      >>> import tempfile
      >>> from jaxtrain.data import ByteTokenizer, corpus
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     texts = Path(folder, "texts")
      ...     texts.mkdir()
      ...     for name in ("one", "two"):
      ...         _ = (texts / f"{name}.txt").write_text(f"this is {name}. ")
      ...     _ = corpus.tokenize_corpus([texts], ByteTokenizer(), Path(folder, "tokens"))
      ...     train = corpus.TokenCorpus(Path(folder, "tokens"))
      ...     train.documents, bytes(train.read(5, 11).tolist())
      (1, b'is two')
    """

    def __init__(self, folder: str | PathLike[str], split: Split = "train", texts: Tokenizer | None = None) -> None:
        self.folder, self.split = Path(folder), split
        manifest = read_manifest(self.folder)
        if texts is not None and tokenizer_digest(texts) != manifest.tokenizer:
            own = "bytes" if manifest.tokenizer == "bytes" else f"{self.folder / 'tokenizer.json'}"
            remedy = "leave out --tokenizer" if manifest.tokenizer == "bytes" else f"use --tokenizer {own}"
            raise UserError(f"{self.folder} has tokens of another tokenizer, {own}: {remedy}")
        self._entries = manifest.validation if split == "validation" else manifest.train
        with scandir(self.folder) as files:
            present = {file.name for file in files}
        for entry in self._entries:
            if entry.file not in present:
                raise UserError(f"{self.folder / entry.file} is missing: {REMEDY}")
        self.vocabulary = manifest.vocabulary
        self.documents = sum(entry.documents for entry in self._entries)
        self._ends = np.array([*accumulate(entry.tokens for entry in self._entries)], np.int64)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._shard = lru_cache(_OPEN_SHARDS)(partial(_open, self.folder, self._entries))

    def __reduce__(self) -> Any:
        return TokenCorpus, (self.folder, self.split)

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the tokens from `start` to `stop`, int32.

        Raises:
          UserError: A shard is cut off or damaged.
        """
        return self._joined([*self._pieces(start, stop)])

    def read_documents(self, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens from `start` to `stop`, int32, and which of them begin a document.

        Raises:
          UserError: A shard is cut off or damaged.
        """
        pieces = [*self._pieces(start, stop)]
        is_first = np.zeros(stop - start, bool)
        end = 0
        for file, mapped, first, last in pieces:
            begin, end = end, end + last - first
            offsets = mapped.documents.offsets
            low, high = np.searchsorted(offsets, (first, last))
            begins = offsets[low:high] - first
            if begins.size and not 0 <= begins.min() <= begins.max() < last - first:
                raise UserError(f"{self.folder / file} is damaged, its offsets are not sorted: {REMEDY}")
            is_first[begin + begins] = True
        return self._joined(pieces), is_first

    def _joined(self, pieces: Sequence[_Piece]) -> NDArray[np.int32]:
        tokens = [mapped.tokens(first, last) for _, mapped, first, last in pieces]
        for piece, values in zip(pieces, tokens, strict=True):
            # The embedding has this many rows, and JAX would clamp larger tokens to the last.
            if (largest := values.max(initial=0)) >= self.vocabulary:
                raise UserError(f"{self.folder / piece.file} is damaged, it has a token {largest}: {REMEDY}")
        return (tokens[0] if len(tokens) == 1 else np.concatenate(tokens)).astype(np.int32)

    def _pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Yield the ranges of the shards that hold the tokens from `start` to `stop`, mapped."""
        if not 0 <= start < stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        number = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            end, entry = int(self._ends[number]), self._entries[number]
            begin, last = end - entry.tokens, min(stop, end)
            if last > start:
                yield _Piece(entry.file, self._shard(number), start - begin, last - begin)
            start, number = last, number + 1


def _open(folder: Path, entries: Sequence[ShardEntry], number: int) -> MappedShard:
    """Map a shard for rows in random order: nothing around them is read from the disk.

    The system's read-ahead would read 264 KiB for a row of 1,024 tokens, instead of 6.
    """
    file, tokens, documents = entries[number]
    mapped = open_shard(folder / file)
    if (found := (len(mapped.documents.tokens), len(mapped.documents))) != (tokens, documents):
        raise UserError(
            f"{folder / file} has {found[0]:,} tokens in {found[1]:,} documents, by the manifest {tokens:,} in"
            f" {documents:,}: {REMEDY}"
        )
    mapped.content.madvise(mmap.MADV_RANDOM)
    return mapped
