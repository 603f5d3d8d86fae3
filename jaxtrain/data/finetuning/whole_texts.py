"""Rows of whole texts for a head on the last token, and the summary of what did not fit into them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.encoded_examples import EncodedExamples, TokenDocuments
from jaxtrain.data.finetuning.rows import check_kind
from jaxtrain.data.packing import Documents, check_length
from jaxtrain.data.source import Example
from jaxtrain.data.token_cache import TokenizedDocuments
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class WholeTextSummary:
    """What rows of whole texts hold of their examples.

    Attributes:
      examples: Number of examples.
      tokens: Number of their tokens.
      cut_examples: Number of examples that are longer than a row and lose their end.
      cut_tokens: Number of the tokens of these that are not in the rows.
      dropped_examples: Number of examples that are not in the rows: preferences with a text that is longer than a row,
        and texts without tokens.
      dropped_tokens: Number of the tokens of these.
      length: Number of tokens of a row.
      labels: Number of the examples in the rows with each label.
    """

    examples: int
    tokens: int
    cut_examples: int
    cut_tokens: int
    dropped_examples: int
    dropped_tokens: int
    length: int
    labels: dict[str, int]

    def lines(self) -> list[str]:
        """Return the summary as sentences.

        Example:
          >>> print(*WholeTextSummary(9, 1000, 2, 30, 0, 0, 128, {"bad": 4, "good": 5}).lines(), sep="\\n")
          9 examples of 1,000 tokens in rows of 128
          2 of them are longer than a row: 30 tokens are cut off at their end
          labels: bad 4, good 5
        """
        lines = [f"{self.examples:,} examples of {self.tokens:,} tokens in rows of {self.length:,}"]
        if self.cut_examples:
            lines.append(
                f"{self.cut_examples:,} of them are longer than a row: {self.cut_tokens:,} tokens are cut off at their"
                " end"
            )
        if self.dropped_examples:
            lines.append(
                f"{self.dropped_examples:,} of them are dropped, with {self.dropped_tokens:,} tokens: a text is longer"
                " than a row, or has no token"
            )
        if self.labels:
            lines.append(f"labels: {', '.join(f'{name} {count:,}' for name, count in self.labels.items())}")
        return lines


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
        tokens = self.documents[number][: self.length]
        return np.pad(tokens.astype(np.int32), (0, self.length - len(tokens)), constant_values=self.pad)


def labelled_rows(
    texts: TokenizedDocuments, labels: NDArray[np.int32], names: Sequence[str], length: int, pad: int
) -> tuple[WholeTexts, WholeTextSummary]:
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
    summary = WholeTextSummary(
        examples=len(sizes),
        tokens=int(sizes.sum()),
        cut_examples=int((cut > 0).sum()),
        cut_tokens=int(cut.sum()),
        dropped_examples=len(sizes) - len(numbers),
        dropped_tokens=0,
        length=width,
        labels=dict(zip(names, counts, strict=True)),
    )
    return WholeTexts(texts, numbers, width, pad, labels[numbers]), summary


def reward_rows(examples: EncodedExamples, length: int, pad: int) -> tuple[WholeTexts, WholeTextSummary]:
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
    summary = WholeTextSummary(
        examples=len(sizes),
        tokens=int(sizes.sum()),
        cut_examples=0,
        cut_tokens=0,
        dropped_examples=int((~fits).sum()),
        dropped_tokens=int(sizes[~fits].sum()),
        length=width,
        labels={},
    )
    return WholeTexts(TokenDocuments(examples), 2 * np.flatnonzero(fits), width, pad), summary
