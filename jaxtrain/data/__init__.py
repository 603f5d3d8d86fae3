"""Sources of examples. `jaxtrain.data.loader` makes batches of them and is the only module that imports grain."""

from jaxtrain.data.archive import check_zip as check_zip
from jaxtrain.data.archive import is_zip as is_zip
from jaxtrain.data.arrays import Arrays, check_labels, digits, npz
from jaxtrain.data.dates import dates as dates
from jaxtrain.data.documents import split_documents, tokenized_rows
from jaxtrain.data.images import ImageFolder, image_folder
from jaxtrain.data.packing import PackedRows, first_fit, pack, pad_tokens
from jaxtrain.data.python_statements import KEYWORDS as KEYWORDS
from jaxtrain.data.python_statements import python_statements as python_statements
from jaxtrain.data.rows import IndexedSource, MappedSource, Subset, split_source, subsample
from jaxtrain.data.source import Example, Source
from jaxtrain.data.tables import ArrowRows, DatasetRows, ParquetRows, is_table, split_table, table
from jaxtrain.data.text import (
    TokenWindows,
    split_contents,
    split_files,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from jaxtrain.data.token_cache import TokenizedDocuments
from jaxtrain.data.tokens import ByteTokenizer, FileTokenizer, Tokenizer, Tokens, tokenizer
from jaxtrain.data.tokens import Role as Role

__all__ = [
    "Arrays",
    "ArrowRows",
    "ByteTokenizer",
    "DatasetRows",
    "Example",
    "FileTokenizer",
    "ImageFolder",
    "IndexedSource",
    "MappedSource",
    "PackedRows",
    "ParquetRows",
    "Source",
    "Subset",
    "TokenWindows",
    "TokenizedDocuments",
    "Tokenizer",
    "Tokens",
    "check_labels",
    "digits",
    "first_fit",
    "image_folder",
    "is_table",
    "loader",
    "npz",
    "pack",
    "pad_tokens",
    "split_contents",
    "split_documents",
    "split_files",
    "split_source",
    "split_table",
    "split_text",
    "stdlib_files",
    "subsample",
    "table",
    "text_files",
    "tokenized_rows",
    "tokenizer",
    "unigram_entropy",
]
