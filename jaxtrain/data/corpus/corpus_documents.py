"""The documents that are tokenized: text files, or a column of a table or of JSON Lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.corpus.corpus_manifest import is_corpus
from jaxtrain.data.corpus.token_corpus import Split
from jaxtrain.data.files.listing import files_under
from jaxtrain.data.files.splits import files_of_splits, names_except
from jaxtrain.data.shards.token_cache import file_identity
from jaxtrain.data.sources import Source, split_source
from jaxtrain.data.tables.json_rows import JSON_SUFFIXES, json_rows
from jaxtrain.data.tables.table_files import is_table, split_table
from jaxtrain.data.text.text_documents import TextRange, encode_range, split_ranges
from jaxtrain.data.text.tokenizer import Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.records import report_unread


class Documents(Protocol):
    """Texts to tokenize, by number."""

    def __len__(self) -> int: ...

    def encode(self, index: int, texts: Tokenizer) -> NDArray[np.integer[Any]]:
        """Return the tokens [N] of a document."""
        ...

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of documents of about `size` bytes."""
        ...


class CorpusPart(NamedTuple):
    """Documents of one split of one corpus."""

    split: Split
    documents: Documents


@dataclass(frozen=True)
class TextDocuments:
    """Contents of files, or of ranges of them, one document each."""

    ranges: Sequence[TextRange]

    def __len__(self) -> int:
        return len(self.ranges)

    def encode(self, index: int, texts: Tokenizer) -> NDArray[np.integer[Any]]:
        """Return the tokens of a file."""
        return encode_range(self.ranges[index], texts)

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of files, each of `size` bytes or a little more."""
        first = found = 0
        for i, (_, start, stop) in enumerate(self.ranges, 1):
            found += stop - start
            if found >= size or i == len(self):
                yield first, i
                first, found = i, 0


@dataclass(frozen=True)
class ColumnDocuments:
    """Texts in a column, one document a row.

    Attributes:
      path: Where the rows are, for messages.
      rows: The rows.
      column: Name of the column.
      row_bytes: Mean size of a row in the files.
    """

    path: Path
    rows: Source
    column: str
    row_bytes: float

    def __len__(self) -> int:
        return len(self.rows)

    def encode(self, index: int, texts: Tokenizer) -> NDArray[np.integer[Any]]:
        """Return the tokens of the text in a row."""
        row = self.rows[index]
        text = row.get(self.column)
        if not isinstance(text, str):
            held = f"is a {type(text).__name__}" if self.column in row else f"is missing beside {', '.join(row)}"
            raise UserError(
                f"{self.column!r} of a row of {self.path} {held}: name a column of texts with --text-column"
            )
        return texts.encode(text)

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows that take about `size` bytes of the files."""
        step = max(1, round(size / max(self.row_bytes, 1)))
        for start in range(0, len(self), step):
            yield start, min(start + step, len(self))


def corpus_parts(path: Path, column: str, validation_fraction: float) -> list[CorpusPart]:
    """Open the documents of a path, split into train and validation as the recipes split them.

    Args:
      path: A text file or a folder of them; JSON Lines, a table, or a folder of either.
      column: Column of the texts in tables and JSON Lines.
      validation_fraction: Fraction of the documents that is held out.

    Raises:
      UserError: There are no documents, or too few to split.
    """
    files = _files(path)
    if is_table(path):
        train, validation = split_table(path, [column], validation_fraction)
    elif all(file.suffix in JSON_SUFFIXES for file in files):
        if named := files_of_splits(files, path):
            report_unread(path, names_except(files, [*named[0], *named[1]], path), what="files")
            train, validation = json_rows(named[0]), json_rows(named[1])
        else:
            train, validation = split_source(json_rows(files), validation_fraction)
    else:
        ranges = split_ranges(path, validation_fraction)
        return [CorpusPart("train", TextDocuments(ranges[0])), CorpusPart("validation", TextDocuments(ranges[1]))]
    row_bytes = sum(file.stat().st_size for file in files) / (len(train) + len(validation))
    return [
        CorpusPart("train", ColumnDocuments(path, train, column, row_bytes)),
        CorpusPart("validation", ColumnDocuments(path, validation, column, row_bytes)),
    ]


def corpus_identity(path: Path) -> list[str]:
    """Return texts that change whenever the content of a corpus does."""
    return [file_identity(file) for file in _files(path)]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path} does not exist: use text files, JSON Lines or a table")
    if is_corpus(path):
        raise UserError(f"{path} is tokenized already: use the corpus that its tokens are of")
    files = [path] if path.is_file() else files_under(path)
    if not files:
        raise UserError(f"{path} has no files: use text files, JSON Lines or a table")
    return files
