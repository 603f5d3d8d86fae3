"""Rows of a fixed number of predictions, cut from a sequence of tokens: in memory, or the shards of a corpus."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.corpus.token_corpus import TokenCorpus
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Consecutive windows of `seq_len` predictions over a sequence of tokens.

    Item `i` is `{"tokens": int32 [seq_len + 1]}` from token `i * seq_len` on: inputs are `tokens[:-1]`, targets
    `tokens[1:]`. Consecutive windows share one token, so that every token but the first is a target once. An incomplete
    last window is dropped.

    Args:
      tokens: int [N].
      seq_len: Number of predictions of a window.

    Raises:
      UserError: `seq_len` is less than 1, or the text is shorter than one window. A window raises it for a token beyond
        int32.

    Example:
      >>> text = TokenWindows(np.frombuffer(b"abcdefgh", np.uint8), seq_len=3)
      >>> [bytes(window["tokens"].tolist()) for window in text]
      [b'abcd', b'defg']
    """

    tokens: NDArray[np.integer[Any]]
    seq_len: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UserError(f"seq_len must be at least 1, got {self.seq_len}")
        if len(self.tokens) <= self.seq_len:
            raise UserError(
                f"the text has {len(self.tokens)} tokens but one window of seq_len {self.seq_len} needs"
                f" {self.seq_len + 1}: use more text or a smaller seq_len"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1]
        if window.dtype.itemsize >= 4 and window.max() > np.iinfo(np.int32).max:
            raise UserError(f"window {index} has the token {window.max()}, beyond int32: use smaller tokens")
        return {"tokens": window.astype(np.int32)}


@dataclass(frozen=True, eq=False)
class CorpusRows:
    """Consecutive rows of `seq_len` predictions of a corpus, whose number and content do not depend on its shards.

    Item `i` has the tokens from `i * seq_len` to `(i + 1) * seq_len`, the last one included, which the next row begins
    with: `{"tokens": int32 [seq_len + 1]}`, as of `TokenWindows`. An incomplete last row is dropped.

    With `packing`, item `i` is `{"tokens", "targets", "segments", "positions"}`, int32 [seq_len] each, as of
    `PackedRows`: `segments` numbers the documents of the row from 1, `positions` the tokens of each from 0. The last
    token of a document, which predicts nothing, is segment 0, and its target must be masked. A document that a row
    cuts continues in the next one as another document.

    Args:
      corpus: The tokens.
      seq_len: Number of predictions of a row.
      packing: Whether to separate the documents of a row.

    Raises:
      UserError: `seq_len` is less than 1, or the corpus is shorter than one row. On access, if a shard is damaged.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from jaxtrain.data import ByteTokenizer, corpus
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     Path(folder, "texts").mkdir()
      ...     for name in ("one", "two", "six"):
      ...         _ = Path(folder, "texts", name).write_text(name)
      ...     _ = corpus.tokenize_corpus([Path(folder, "texts")], ByteTokenizer(), Path(folder, "tokens"))
      ...     tokens = corpus.TokenCorpus(Path(folder, "tokens"))
      ...     bytes(CorpusRows(tokens, 4)[0]["tokens"].tolist()), CorpusRows(tokens, 4, packing=True)[0]["segments"]
      (b'onesi', array([1, 1, 0, 2], dtype=int32))
    """

    corpus: TokenCorpus
    seq_len: int
    packing: bool = False

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UserError(f"seq_len must be at least 1, got {self.seq_len}")
        if self.corpus.tokens <= self.seq_len:
            raise UserError(
                f"{self.corpus.folder} has {self.corpus.tokens} tokens for {self.corpus.split} but one row of seq_len"
                f" {self.seq_len} needs {self.seq_len + 1}: use more text or a smaller seq_len"
            )

    def __len__(self) -> int:
        return (self.corpus.tokens - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = index * self.seq_len, (index + 1) * self.seq_len + 1
        if not self.packing:
            return {"tokens": self.corpus.read(start, stop)}
        tokens, is_first = self.corpus.read_documents(start, stop)
        is_last, is_first = is_first[1:], is_first[:-1]
        is_first[0] = True
        segments = np.cumsum(is_first, dtype=np.int32)
        columns = np.arange(self.seq_len, dtype=np.int32)
        begins = np.maximum.accumulate(np.where(is_first, columns, 0))
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segments": np.where(is_last, 0, segments).astype(np.int32),
            "positions": (columns - begins).astype(np.int32),
        }
