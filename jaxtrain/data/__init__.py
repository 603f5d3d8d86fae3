"""Sources of examples. `jaxtrain.data.batches` makes batches of them; its `loader` alone imports grain."""

from jaxtrain.data.archive import check_zip as check_zip
from jaxtrain.data.archive import is_zip as is_zip
from jaxtrain.data.arrays import Arrays, check_labels, digits, npz
from jaxtrain.data.baselines import bag_of_words_accuracy
from jaxtrain.data.conversion import tensor_to_numpy as tensor_to_numpy
from jaxtrain.data.dates import dates
from jaxtrain.data.documents import split_documents, tokenized_rows
from jaxtrain.data.encoding import distinct_labels, encode_pair, encode_row, encode_text
from jaxtrain.data.files import check_content as check_content
from jaxtrain.data.images import ImageFolder, image_folder, split_images
from jaxtrain.data.json_rows import JsonArray, JsonLines, json_rows
from jaxtrain.data.kinds import Kind as Kind
from jaxtrain.data.kinds import digest_of as digest_of
from jaxtrain.data.kinds import kind_of as kind_of
from jaxtrain.data.language import LanguageRows as LanguageRows
from jaxtrain.data.language import language_rows as language_rows
from jaxtrain.data.language import text_windows as text_windows
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.model_folder import inside as inside
from jaxtrain.data.model_folder import read_json as read_json
from jaxtrain.data.packing import PackedRows, first_fit, pack, pad_tokens
from jaxtrain.data.permutation import Permutation
from jaxtrain.data.pixels import pixels
from jaxtrain.data.python_statements import KEYWORDS, python_statements
from jaxtrain.data.rows import IndexedSource, MappedSource, Subset, split_source, subsample
from jaxtrain.data.source import Batch as Batch
from jaxtrain.data.source import Collate as Collate
from jaxtrain.data.source import Example, Source
from jaxtrain.data.source import Rows as Rows
from jaxtrain.data.table_rows import ArrowRows, DatasetRows, ParquetRows
from jaxtrain.data.tables import is_table, split_columns, split_table, table
from jaxtrain.data.text import (
    TokenWindows,
    split_contents,
    split_files,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from jaxtrain.data.text_stream import decode_stream, replace_unprintable
from jaxtrain.data.token_cache import TokenizedDocuments
from jaxtrain.data.tokens import ByteTokenizer, FileTokenizer, Tokenizer, Tokens, tokenizer
from jaxtrain.data.tokens import Role as Role

__all__ = [
    "KEYWORDS",
    "Arrays",
    "ArrowRows",
    "ByteTokenizer",
    "DatasetRows",
    "Example",
    "FileTokenizer",
    "ImageFolder",
    "IndexedSource",
    "JsonArray",
    "JsonLines",
    "MappedSource",
    "Mixture",
    "PackedRows",
    "ParquetRows",
    "Permutation",
    "Source",
    "Subset",
    "TokenWindows",
    "TokenizedDocuments",
    "Tokenizer",
    "Tokens",
    "bag_of_words_accuracy",
    "batches",
    "check_labels",
    "corpus",
    "dates",
    "decode_stream",
    "digits",
    "distinct_labels",
    "encode_pair",
    "encode_row",
    "encode_text",
    "finetuning",
    "first_fit",
    "image_folder",
    "is_table",
    "json_rows",
    "loader",
    "npz",
    "pack",
    "pad_tokens",
    "pixels",
    "python_statements",
    "replace_unprintable",
    "split_columns",
    "split_contents",
    "split_documents",
    "split_files",
    "split_images",
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
