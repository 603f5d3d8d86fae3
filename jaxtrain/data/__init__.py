"""Where examples come from; `jaxtrain.data.loader` turns them into batches, and alone imports grain."""

from jaxtrain.data.archive import check_members, is_zip
from jaxtrain.data.arrays import Arrays, check_labels, digits, npz
from jaxtrain.data.dates import dates
from jaxtrain.data.documents import split_documents, tokenized_rows
from jaxtrain.data.images import ImageFolder, image_folder
from jaxtrain.data.packing import Packed, first_fit, pack, padded
from jaxtrain.data.python_statements import KEYWORDS, python_statements
from jaxtrain.data.rows import Chosen, Mapped, Numbered, split_source, thinned
from jaxtrain.data.source import Example, Source
from jaxtrain.data.tables import ArrowRows, DatasetRows, ParquetRows, is_table, split_table, table
from jaxtrain.data.text import (
    Text,
    split_contents,
    split_files,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from jaxtrain.data.token_cache import TokenizedDocuments
from jaxtrain.data.tokens import ByteTokenizer, FileTokenizer, Role, Tokenizer, Tokens, tokenizer

__all__ = [
    "KEYWORDS",
    "Arrays",
    "ArrowRows",
    "ByteTokenizer",
    "Chosen",
    "DatasetRows",
    "Example",
    "FileTokenizer",
    "ImageFolder",
    "Mapped",
    "Numbered",
    "Packed",
    "ParquetRows",
    "Role",
    "Source",
    "Text",
    "TokenizedDocuments",
    "Tokenizer",
    "Tokens",
    "check_labels",
    "check_members",
    "dates",
    "digits",
    "first_fit",
    "image_folder",
    "is_table",
    "is_zip",
    "loader",
    "npz",
    "pack",
    "padded",
    "python_statements",
    "split_contents",
    "split_documents",
    "split_files",
    "split_source",
    "split_table",
    "split_text",
    "stdlib_files",
    "table",
    "text_files",
    "thinned",
    "tokenized_rows",
    "tokenizer",
    "unigram_entropy",
]
