"""Text files and table columns as tokenized documents, read from the token cache."""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.files.listing import files_under
from jaxtrain.data.holdout import share
from jaxtrain.data.shards.shard import TokenizedDocuments
from jaxtrain.data.shards.token_cache import file_identity, tokenized
from jaxtrain.data.sources import Source
from jaxtrain.data.tables.table_files import is_table, split_table
from jaxtrain.data.text.text_files import split_files, stdlib_files, text_files, warn_of_encoding
from jaxtrain.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jaxtrain.errors import UserError

_VALIDATION_FRACTION = 0.1


class TextRange(NamedTuple):
    """The bytes of a file from `start` to `stop`."""

    file: Path
    start: int
    stop: int


def split_documents(
    path: Path | None, texts: Tokenizer, column: str = "text"
) -> tuple[TokenizedDocuments, TokenizedDocuments]:
    """Tokenize the text files of a path, or of Python's standard library, one document per file; or a table's rows.

    Args:
      path: A text file or folder; None for the standard library. A single file is cut in two. Or a table.
      texts: Tokenizer.
      column: Column of the texts, if the path is a table.

    Returns:
      A tuple (train, validation), split as by `split_text`, or as by `split_table`.

    Raises:
      UserError: There is no text, or too little to split.
    """
    if path is not None and is_table(path):
        train_rows, validation_rows = split_table(path, [column])
        return (
            tokenized_rows(path, train_rows, column, texts, "train"),
            tokenized_rows(path, validation_rows, column, texts, "validation"),
        )
    train, validation = split_ranges(path)
    return _tokenized_ranges(train, texts), _tokenized_ranges(validation, texts)


def tokenized_rows(path: Path, rows: Source, column: str, texts: Tokenizer, part: str) -> TokenizedDocuments:
    """Tokenize the texts in a column of a table, one document per row.

    Args:
      path: File or folder of the table.
      rows: The rows to tokenize, of that table.
      column: Column of the texts.
      texts: Tokenizer.
      part: Name of the part of the table that the rows are, such as "train".

    Returns:
      The documents, in the order of the rows.
    """

    def documents() -> Iterator[NDArray[np.integer[Any]]]:
        return (texts.encode(str(rows[i][column])) for i in range(len(rows)))

    files = [path] if path.is_file() else files_under(path)
    return _cached(texts, (column, part, str(len(rows)), *map(file_identity, files)), documents)


def split_ranges(
    path: Path | None, validation_fraction: float = _VALIDATION_FRACTION
) -> tuple[list[TextRange], list[TextRange]]:
    """Split the text files of a path, or of Python's standard library, as (train, validation).

    Args:
      path: A text file or folder; None for the standard library. A single file is cut in two.
      validation_fraction: Fraction of the files that is held out.

    Raises:
      UserError: There is no text, or too little to split.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    files = stdlib_files() if path is None else text_files(path)
    if len(files) == 1:
        (file,) = files
        size = file.stat().st_size
        cut = size - share(size, validation_fraction)
        train, validation = [TextRange(file, 0, cut)], [TextRange(file, cut, size)]
    else:
        train, validation = (
            [TextRange(f, 0, f.stat().st_size) for f in part] for part in split_files(files, root, validation_fraction)
        )
    if not all(any(part.stop > part.start for part in parts) for parts in (train, validation)):
        raise UserError(f"the text in {root} is too short to split into train and validation: give more text")
    return train, validation


def encode_range(part: TextRange, texts: Tokenizer) -> NDArray[np.integer[Any]]:
    """Return the tokens of a part of a text file."""
    content = part.file.read_bytes()[part.start : part.stop]
    if not isinstance(texts, ByteTokenizer):
        warn_of_encoding(part.file, content)
    return texts.encode_file(content)


def _tokenized_ranges(ranges: list[TextRange], texts: Tokenizer) -> TokenizedDocuments:
    def documents() -> Iterator[NDArray[np.integer[Any]]]:
        return (encode_range(part, texts) for part in ranges)

    return _cached(texts, [f"{start} {stop} {file_identity(file)}" for file, start, stop in ranges], documents)


def _cached(texts: Tokenizer, parts: Iterable[str], documents: Any) -> TokenizedDocuments:
    if isinstance(texts, ByteTokenizer):
        return tokenized(["bytes", *parts], documents, np.uint8)
    dtype = np.min_scalar_type(max(texts.size - 1, 0))
    if not isinstance(texts, FileTokenizer):
        return tokenized(None, documents, dtype)
    return tokenized([*texts.identity(), *parts], documents, dtype)
