"""Rows of whole texts, for a head on the last token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.rows.masked_texts import EncodedExamples, TokenDocuments, check_kind
from jaxtrain.data.rows.packing import Documents, check_length
from jaxtrain.data.rows.padded import pad_tokens
from jaxtrain.data.rows.row_summary import RowSummary
from jaxtrain.data.shards.shard import TokenizedDocuments
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError


@dataclass(frozen=True, eq=False)
class WholeTexts:
    """Texts as rows: item `i` has `"tokens"`, int32 [length], padded at the end, and `"label"`, an int32 number.

    The rows of preferences have no label, and the tokens of both texts, [2, length], first the chosen one.

    Attributes:
      documents: The texts.
      numbers: Number of the text of every row, of the chosen one where there are two, int [rows].
      length: Number of tokens of a row.
      pad: Padding token.
      labels: Label of every row, int32 [rows]; None for preferences.
    """

    documents: Documents
    numbers: NDArray[np.intp]
    length: int
    pad: int
    labels: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = int(self.numbers[index])
        if self.labels is None:
            return {"tokens": np.stack([self._padded(first), self._padded(first + 1)])}
        return {"tokens": self._padded(first), "label": self.labels[index]}

    def text(self, index: int, side: int = 0) -> NDArray[np.int32]:
        """Return the tokens of a row without padding; of preferences those of the chosen text, or of the other (1)."""
        return self.documents[int(self.numbers[index]) + side][: self.length].astype(np.int32)

    def _padded(self, number: int) -> NDArray[np.int32]:
        return pad_tokens(self.documents[number], self.length, self.pad)[0]


def labelled_rows(
    texts: TokenizedDocuments, labels: NDArray[np.int32], names: Sequence[str], length: int, pad: int
) -> tuple[WholeTexts, RowSummary]:
    """Return rows of labelled texts.

    Args:
      texts: The texts.
      labels: Number of the label of each, int32 [texts].
      names: Names of the labels.
      length: Largest number of tokens of a row; longer texts lose their end. Rows are no longer than the longest text.
      pad: Padding token.

    Returns:
      A tuple (rows, summary).

    Raises:
      UserError: The length is less than 1, or no text has a token.

    Example:
      >>> texts = TokenizedDocuments(np.array([4, 5, 6, 7]), np.array([0, 3, 4]))
      >>> rows, summary = labelled_rows(texts, np.array([1, 0], np.int32), ("bad", "good"), length=2, pad=0)
      >>> rows[0]["tokens"].tolist(), rows[1]["tokens"].tolist(), summary.cut_tokens
      ([4, 5], [7, 0], 1)
    """
    check_length(length)
    sizes = np.diff(texts.offsets)
    (numbers,) = np.nonzero(sizes)
    if not len(numbers):
        raise UserError("no text has a token: use texts that are not empty")
    cut = np.maximum(sizes - length, 0)
    counts = np.bincount(labels[numbers], minlength=len(names)).tolist()
    width = min(length, int(sizes.max()))
    summary = RowSummary(
        examples=len(sizes),
        tokens=int(sizes.sum()),
        rows=len(numbers),
        length=width,
        cut_examples=int((cut > 0).sum()),
        cut_tokens=int(cut.sum()),
        empty=len(sizes) - len(numbers),
        labels=dict(zip(names, counts, strict=True)),
    )
    return WholeTexts(texts, numbers, width, pad, labels[numbers]), summary


def reward_rows(examples: EncodedExamples, length: int, pad: int) -> tuple[WholeTexts, RowSummary]:
    """Return rows of preferences.

    Preferences with a text longer than a row are dropped, as by TRL: without its end the score of a text would be that
    of another one.

    Args:
      examples: Encoded preferences.
      length: Largest number of tokens of a text. Rows are no longer than the longest text.
      pad: Padding token.

    Returns:
      A tuple (rows, summary).

    Raises:
      UserError: The length is less than 1, the examples are no preferences or have weights, or none fits.
    """
    check_kind(examples.kind, are_pairs=True)
    if examples.weights is not None and (examples.weights != 1).any():
        raise UserError("rewards are learned without weights of examples: remove the field weight")
    check_length(length)
    sizes = examples.lengths.reshape(-1, 2)
    fits = (sizes > 0).all(1) & (sizes <= length).all(1)
    if not fits.any():
        raise UserError(f"every preference has a text of more than {length:,} tokens: use longer rows")
    width = int(sizes[fits].max())
    summary = RowSummary(
        examples=len(sizes),
        tokens=int(sizes.sum()),
        rows=int(fits.sum()),
        length=width,
        too_long=int((sizes > length).any(1).sum()),
        empty=int((~fits & (sizes <= length).all(1)).sum()),
        dropped_tokens=int(sizes[~fits].sum()),
    )
    return WholeTexts(TokenDocuments(examples), 2 * np.flatnonzero(fits), width, pad), summary
