"""Rows of equal length from encoded examples, with a summary of what did not fit into them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.rows.masked_texts import EncodedExamples, TokenDocuments, TokenWeights, check_kind
from jaxtrain.data.rows.packing import PackedRows, Piece, check_length, pack_pieces
from jaxtrain.data.rows.row_summary import RowSummary, reasons
from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError


@dataclass(frozen=True, eq=False)
class PreferenceRows:
    """Rows of pairs: item `i` is as that of `PackedRows`, [2, length] each, first the chosen text, then the rejected.

    Attributes:
      texts: Rows of the texts, those of a pair one after the other.
    """

    texts: PackedRows

    def __len__(self) -> int:
        return len(self.texts) // 2

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        chosen, rejected = self.texts[2 * index], self.texts[2 * index + 1]
        return {name: np.stack([chosen[name], rejected[name]]) for name in chosen}


def supervised_rows(
    examples: EncodedExamples, length: int, pad: int, *, packing: bool = True
) -> tuple[PackedRows, RowSummary]:
    """Return rows of texts, completions or conversations, each with its loss mask.

    An example has `length + 1` tokens at most and loses its end otherwise, but a `PlainText` is divided, as by `pack`.
    The rows depend on the examples only, so that a row number is a resumable position; tokens are read on access.

    Args:
      examples: Encoded examples.
      length: Number of predictions of a row.
      pad: Padding token.
      packing: Whether a row holds as many examples as fit, or one.

    Returns:
      A tuple (rows, summary). A row has `"tokens"`, `"targets"`, `"segments"` and `"positions"`, int32 [length], and
      `"weight"`, float32 [length], which is the example's weight where the target is in the loss and 0 elsewhere.

    Raises:
      UserError: The length is less than 1, the examples are preferences, or no example is left.

    Example:
      >>> from jaxtrain.data import TokenizedDocuments
      >>> from jaxtrain.data.finetuning import Conversation
      >>> coded = np.array([2, 4, 7, 9, 10, 3, 12, 15])  # tokens 1 2 3 4 5 and 1 6 7; 3, 4, 1 and 7 in the loss
      >>> examples = EncodedExamples(TokenizedDocuments(coded, np.array([0, 5, 8])), Conversation)
      >>> rows, summary = supervised_rows(examples, length=4, pad=0)
      >>> rows[0]["targets"].tolist(), rows[0]["weight"].tolist()
      ([2, 3, 4, 5], [0.0, 1.0, 1.0, 0.0])
      >>> summary.rows, summary.loss_tokens
      (2, 3)
    """
    check_kind(examples.kind, are_pairs=False)
    pieces, counts = _fit(examples, length)
    rows = pack_pieces(pieces, length) if packing else tuple((piece,) for piece in pieces)
    packed = PackedRows(TokenDocuments(examples), rows, length, pad, TokenWeights(examples))
    return packed, RowSummary(rows=len(rows), length=length, **counts)


def preference_rows(examples: EncodedExamples, length: int, pad: int) -> tuple[PreferenceRows, RowSummary]:
    """Return rows of pairs of a chosen and a rejected text, padded.

    Args:
      examples: Encoded preferences.
      length: Number of predictions of a row; a text has `length + 1` tokens at most and loses its end otherwise.
      pad: Padding token.

    Returns:
      A tuple (rows, summary). A row is that of `supervised_rows`, with a leading axis of two.

    Raises:
      UserError: The length is less than 1, the examples are no preferences, or no example is left.
    """
    check_kind(examples.kind, are_pairs=True)
    pieces, counts = _fit(examples, length)
    texts = PackedRows(
        TokenDocuments(examples), tuple((piece,) for piece in pieces), length, pad, TokenWeights(examples)
    )
    rows = PreferenceRows(texts)
    return rows, RowSummary(rows=len(rows), length=length, **counts)


def _fit(examples: EncodedExamples, length: int) -> tuple[list[Piece], dict[str, Any]]:
    """Return the pieces of texts that rows hold, and the counts of a summary."""
    check_length(length)
    pieces: list[Piece] = []
    counts = Counter[str]()
    sizes = examples.lengths.tolist()
    per_example = examples.kind.sides
    for first in range(0, len(sizes), per_example):
        numbers = range(first, first + per_example)
        tokens = sum(sizes[i] for i in numbers)
        counts["tokens"] += tokens
        # A text of n tokens has n - 1 predictions.
        stops = [sizes[i] - 1 if examples.kind.continues else min(sizes[i] - 1, length) for i in numbers]
        in_loss = [examples.mask(i)[1:] for i in numbers]
        kept = [int(mask[:stop].sum()) for mask, stop in zip(in_loss, stops, strict=True)]
        reason = _reason(in_loss, kept, examples.weight(first))
        if reason:
            counts[reason] += 1
            counts["dropped_tokens"] += tokens
            continue
        cut = tokens - sum(stop + 1 for stop in stops)
        counts["cut_examples"] += cut > 0
        counts["cut_tokens"] += cut
        counts["cut_loss_tokens"] += sum(int(mask.sum()) for mask in in_loss) - sum(kept)
        counts["loss_tokens"] += sum(kept)
        for i, stop in zip(numbers, stops, strict=True):
            pieces += [Piece(i, start, min(start + length, stop)) for start in range(0, stop, length)]
    counts |= _divided(examples)
    if not pieces:
        raise UserError(
            f"no example has a token in the loss that fits into a row of {length:,} ({reasons(counts)}): use longer"
            " rows, or examples with an answer, a message of the role assistant"
        )
    return pieces, {"examples": len(sizes) // per_example, **counts}


def _reason(in_loss: Sequence[NDArray[np.bool_]], kept: Sequence[int], weight: float) -> str | None:
    """Return the count of a summary that an example belongs to if it is dropped."""
    if not all(mask.any() for mask in in_loss):
        return "unanswered"
    if not all(kept):
        return "cut_away"
    return None if weight else "weightless"


def _divided(examples: EncodedExamples) -> Counter[str]:
    """Return how many conversations are several texts, and how many these are."""
    if examples.numbers is None or examples.kind.sides > 1:
        return Counter()
    texts = np.bincount(examples.numbers)
    several = texts[texts > 1]
    return Counter(divided=len(several), parts=int(several.sum()))
