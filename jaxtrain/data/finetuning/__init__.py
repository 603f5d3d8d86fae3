"""Data to fine-tune language models on: examples, chat templates, loss masks and rows."""

from jaxtrain.data.finetuning.chat_template import ChatTemplate, Span
from jaxtrain.data.finetuning.encoded_examples import encode_examples
from jaxtrain.data.finetuning.example_files import ExampleFiles, Parse, read_examples, split_examples
from jaxtrain.data.finetuning.example_page import Run, decoded_runs, print_examples
from jaxtrain.data.finetuning.examples import (
    Completion,
    Conversation,
    FineTuningExample,
    Message,
    PlainText,
    Preference,
    parse_example,
)
from jaxtrain.data.finetuning.labelled_texts import (
    LabelledText,
    encode_labelled,
    label_names,
    label_numbers,
    parse_labelled,
)
from jaxtrain.data.finetuning.loss_masks import encode_example
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.finetuning.remarks import duplicates, remarks
from jaxtrain.data.finetuning.stdlib_docstrings import Pair, StdlibPairs, stdlib_pairs, write_stdlib_pairs
from jaxtrain.data.rows.masked_texts import Encoded, EncodedExamples
from jaxtrain.data.rows.masked_texts import check_kind as check_kind
from jaxtrain.data.rows.row_summary import RowSummary
from jaxtrain.data.rows.supervised import PreferenceRows, preference_rows, supervised_rows
from jaxtrain.data.rows.whole_texts import WholeTexts, labelled_rows, reward_rows

__all__ = [
    "ChatTemplate",
    "Completion",
    "Conversation",
    "Encoded",
    "EncodedExamples",
    "ExampleFiles",
    "FineTuningExample",
    "LabelledText",
    "Message",
    "ModelTokenizer",
    "Pair",
    "Parse",
    "PlainText",
    "Preference",
    "PreferenceRows",
    "RowSummary",
    "Run",
    "Span",
    "StdlibPairs",
    "WholeTexts",
    "decoded_runs",
    "duplicates",
    "encode_example",
    "encode_examples",
    "encode_labelled",
    "label_names",
    "label_numbers",
    "labelled_rows",
    "parse_example",
    "parse_labelled",
    "preference_rows",
    "print_examples",
    "read_examples",
    "remarks",
    "reward_rows",
    "split_examples",
    "stdlib_pairs",
    "supervised_rows",
    "write_stdlib_pairs",
]
