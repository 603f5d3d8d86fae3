"""Sources of examples. `jaxtrain.data.batches` makes batches of them; its `loader` alone imports grain.

sources, mixture    a length and examples by number; subsets, functions and mixtures of them
collate, columns    examples as the arrays of a batch, which `conversion` takes from NumPy, JAX and PyTorch
reading/            readers of sources, streams and DataLoaders, and the threads that read ahead
files/              folders and files that may come from somebody else
images/, tables/    labelled images; parquet, Arrow and JSON
text/               files, tokenizers and tokenized documents
shards/, corpus/    tokens on disk, and corpora of them
rows/               rows of equal length from tokens: padded, packed, windows
finetuning/         examples, chat templates and loss masks
"""

from jaxtrain.data.conversion import tensor_to_numpy as tensor_to_numpy
from jaxtrain.data.files.archive import check_zip as check_zip
from jaxtrain.data.files.archive import is_zip as is_zip
from jaxtrain.data.files.listing import check_content as check_content
from jaxtrain.data.files.model_folder import inside as inside
from jaxtrain.data.files.model_folder import read_json as read_json
from jaxtrain.data.images.image_folders import ImageFolder, image_folder, split_images
from jaxtrain.data.images.labelled_arrays import Arrays, check_labels, digits, npz
from jaxtrain.data.images.pixels import pixels
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.permutation import Permutation
from jaxtrain.data.reading.data_kinds import Kind as Kind
from jaxtrain.data.reading.data_kinds import digest_of as digest_of
from jaxtrain.data.reading.data_kinds import kind_of as kind_of
from jaxtrain.data.reading.torch_loader import RandomStates as RandomStates
from jaxtrain.data.reading.torch_loader import begin_epoch as begin_epoch
from jaxtrain.data.rows.language_rows import LanguageRows as LanguageRows
from jaxtrain.data.rows.language_rows import language_rows as language_rows
from jaxtrain.data.rows.language_rows import text_windows as text_windows
from jaxtrain.data.rows.packing import PackedRows, first_fit, pack
from jaxtrain.data.rows.padded import distinct_labels, encode_pair, encode_row, encode_text, pad_tokens
from jaxtrain.data.rows.windows import TokenWindows
from jaxtrain.data.shards.shard import TokenizedDocuments
from jaxtrain.data.sources import Batch as Batch
from jaxtrain.data.sources import Collate as Collate
from jaxtrain.data.sources import Example, IndexedSource, MappedSource, Source, Subset, split_source, subsample
from jaxtrain.data.sources import Rows as Rows
from jaxtrain.data.tables.json_rows import JsonArray, JsonLines, json_rows
from jaxtrain.data.tables.table_files import is_table, split_columns, split_table, table
from jaxtrain.data.tables.table_rows import ArrowRows, DatasetRows, ParquetRows
from jaxtrain.data.text.baselines import bag_of_words_accuracy
from jaxtrain.data.text.dates import dates
from jaxtrain.data.text.python_statements import KEYWORDS, python_statements
from jaxtrain.data.text.text_documents import split_documents, tokenized_rows
from jaxtrain.data.text.text_files import (
    split_contents,
    split_files,
    split_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from jaxtrain.data.text.text_stream import decode_stream, replace_unprintable
from jaxtrain.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, Tokens, tokenizer
from jaxtrain.data.text.tokenizer import Role as Role

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
