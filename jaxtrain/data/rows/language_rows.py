"""Rows of language models: windows over text, packed texts, or tokenized corpora."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.corpus import corpus_mixtures, named_corpora
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.rows.packing import pack
from jaxtrain.data.rows.windows import TokenWindows
from jaxtrain.data.sources import Example, Source, subsample
from jaxtrain.data.tables.table_files import is_table
from jaxtrain.data.text.text_documents import split_documents
from jaxtrain.data.text.text_files import unigram_entropy
from jaxtrain.data.text.tokenizer import Tokenizer
from jaxtrain.errors import UserError

_ENTROPY_ROWS = 4096


class LanguageRows(NamedTuple):
    """Rows of a causal language model.

    Attributes:
      train: Rows to train on.
      validation: Rows that are held out.
      entropy: The unigram entropy of the validation targets, in nats.
    """

    train: Source
    validation: Source
    entropy: float

    @property
    def description(self) -> str:
        """The numbers of rows; of a mixture those of each source, with its share of the batches."""
        return f"{_row_counts(self.train)} for training, {len(self.validation):,} for validation"


def language_rows(
    data: Path | None, texts: Tokenizer, seq_len: int, *, packing: bool, column: str, validation_rows: int
) -> LanguageRows:
    """Read rows of `seq_len` predictions.

    Args:
      data: Text or a table, or folders of tokens with weights; None for Python's standard library.
      texts: Tokenizer.
      seq_len: Number of predictions of a row.
      packing: Whether to pack whole texts, without attention between them; always of tables.
      column: Column of the texts of a table.
      validation_rows: Largest number of packed validation rows.

    Raises:
      UserError: The data cannot be read, or is too short.
    """
    if corpora := named_corpora(data):
        mixtures = corpus_mixtures(corpora, texts, seq_len, packing)
        return LanguageRows(*mixtures, _entropy(mixtures.validation))
    if not packing and (data is None or not is_table(data)):
        train, validation = text_windows(data, texts, seq_len)
        return LanguageRows(train, validation, unigram_entropy(validation.tokens))
    of_train, of_validation = split_documents(data, texts, column)
    packed = subsample(pack(of_validation, seq_len, pad=0), validation_rows)
    return LanguageRows(pack(of_train, seq_len, pad=0), packed, _entropy(packed))


def text_windows(data: Path | None, texts: Tokenizer, seq_len: int) -> tuple[TokenWindows, TokenWindows]:
    """Return windows over all text, of `seq_len` predictions each, as (train, validation).

    Args:
      data: Text; None for Python's standard library.
      texts: Tokenizer.
      seq_len: Number of predictions of a row.

    Raises:
      UserError: There is no text, it is too short, or it is tokenized already.
    """
    if named_corpora(data):
        raise UserError(f"--data {data} has tokens, which gpt-stdlib and llama-stdlib read: give text")
    train, validation = split_documents(data, texts)
    sizes = len(train.tokens), len(validation.tokens)
    if min(sizes) <= seq_len:
        raise UserError(
            f"{data} has {sizes[0]} tokens to train on and {sizes[1]} held out, but one window of seq_len {seq_len}"
            f" needs {seq_len + 1}: use more text or a smaller seq_len"
        )
    return TokenWindows(train.tokens, seq_len), TokenWindows(validation.tokens, seq_len)


def _row_counts(train: Source) -> str:
    if not isinstance(train, Mixture):
        return f"{len(train):,}"
    shares = (count / sum(train.counts) for count in train.counts)
    return " and ".join(
        f"{len(source):,} ({share:.4g})" if share < 1 else f"{len(source):,}"
        for source, share in zip(train.sources, shares, strict=True)
    )


def _entropy(rows: Source) -> float:
    """Return the unigram entropy of the targets in the first rows."""
    examples = [rows[i] for i in range(min(len(rows), _ENTROPY_ROWS))]
    return unigram_entropy(np.concatenate([_targets(example) for example in examples]))


def _targets(row: Example) -> NDArray[np.int32]:
    targets: NDArray[np.int32] = row["targets"][row["segments"] > 0] if "segments" in row else row["tokens"][1:]
    return targets
