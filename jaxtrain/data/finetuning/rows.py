"""Rows of equal length from encoded examples, and the summary of what did not fit into them."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.finetuning.encoded_examples import EncodedExamples, MaskDocuments, TokenDocuments, texts_per_example
from jaxtrain.data.finetuning.examples import PlainText, Preference
from jaxtrain.data.packing import PackedRows, Piece, check_length, pack_pieces
from jaxtrain.data.source import Example
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class RowSummary:
    """What rows hold of their examples.

    Attributes:
      examples: Number of examples.
      tokens: Number of their tokens.
      cut_examples: Number of examples that are longer than a row and lose their end, but are in the rows.
      cut_tokens: Number of the tokens of these that are not in the rows.
      dropped_examples: Number of examples that are not in the rows: no token in the loss is in their first
        `length + 1` tokens, or one of the two texts of a preference has none.
      dropped_tokens: Number of the tokens of these.
      loss_tokens: Number of tokens in the loss.
      rows: Number of rows.
      length: Number of predictions of a row.
    """

    examples: int
    tokens: int
    cut_examples: int
    cut_tokens: int
    dropped_examples: int
    dropped_tokens: int
    loss_tokens: int
    rows: int
    length: int

    def lines(self) -> list[str]:
        """Return the summary as sentences.

        Example:
          >>> print(*RowSummary(9, 1000, 2, 30, 1, 70, 400, 8, 128).lines(), sep="\\n")
          9 examples of 1,000 tokens in 8 rows of 128: 400 tokens (40.0%) are in the loss
          2 examples (22.2%) are longer than a row: 30 tokens (3.0%) are cut off at their end
          1 example (11.1%) is dropped, with 70 tokens (7.0%): no token that fits into a row is in the loss
        """
        lines = [
            f"{_count(self.examples, 'example')} of {_count(self.tokens, 'token')} in {_count(self.rows, 'row')} of"
            f" {self.length:,}: {_share(self.loss_tokens, self.tokens, 'token')} in the loss"
        ]
        if self.cut_examples:
            lines.append(
                f"{_share(self.cut_examples, self.examples, 'example')} longer than a row:"
                f" {_share(self.cut_tokens, self.tokens, 'token')} cut off at their end"
            )
        if self.dropped_examples:
            dropped = _share(self.dropped_tokens, self.tokens, "token").rpartition(" ")[0]
            lines.append(
                f"{_share(self.dropped_examples, self.examples, 'example')} dropped, with {dropped}: no token that"
                " fits into a row is in the loss"
            )
        return lines


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
      `"weight"`, float32 [length], which is 1 where the target is in the loss.

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
    if examples.kind is Preference:
        raise UserError("the examples are preferences: choose a method that learns from chosen and rejected answers")
    pieces, counts = _fit(examples, length)
    rows = pack_pieces(pieces, length) if packing else tuple((piece,) for piece in pieces)
    packed = PackedRows(TokenDocuments(examples), rows, length, pad, MaskDocuments(examples))
    return packed, RowSummary(**counts, rows=len(rows), length=length)


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
    if examples.kind is not Preference:
        raise UserError(f"the examples are of the kind {examples.kind.__name__}: add the fields chosen and rejected")
    pieces, counts = _fit(examples, length)
    texts = PackedRows(
        TokenDocuments(examples), tuple((piece,) for piece in pieces), length, pad, MaskDocuments(examples)
    )
    rows = PreferenceRows(texts)
    return rows, RowSummary(**counts, rows=len(rows), length=length)


def _fit(examples: EncodedExamples, length: int) -> tuple[list[Piece], dict[str, int]]:
    """Return the pieces of texts that rows hold, and the counts of a summary."""
    check_length(length)
    pieces: list[Piece] = []
    counts = Counter[str]()
    sizes = examples.lengths.tolist()
    per_example = texts_per_example(examples.kind)
    for first in range(0, len(sizes), per_example):
        numbers = range(first, first + per_example)
        tokens = sum(sizes[i] for i in numbers)
        # A text of n tokens has n - 1 predictions.
        stops = [sizes[i] - 1 if examples.kind is PlainText else min(sizes[i] - 1, length) for i in numbers]
        in_loss = [int(examples.mask(i)[1 : stop + 1].sum()) for i, stop in zip(numbers, stops, strict=True)]
        counts["tokens"] += tokens
        if not all(in_loss):
            counts["dropped_examples"] += 1
            counts["dropped_tokens"] += tokens
            continue
        cut = tokens - sum(stop + 1 for stop in stops)
        counts["cut_examples"] += cut > 0
        counts["cut_tokens"] += cut
        counts["loss_tokens"] += sum(in_loss)
        for i, stop in zip(numbers, stops, strict=True):
            pieces += [Piece(i, start, min(start + length, stop)) for start in range(0, stop, length)]
    if not pieces:
        raise UserError(
            f"no example has a token in the loss that fits into a row of {length:,}: use longer rows, or examples with"
            " an answer of the assistant"
        )
    names = ("tokens", "cut_examples", "cut_tokens", "dropped_examples", "dropped_tokens", "loss_tokens")
    return pieces, {"examples": len(sizes) // per_example, **{name: counts[name] for name in names}}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _share(number: int, total: int, noun: str) -> str:
    share = f" ({number / total:.1%})" if total else ""
    return f"{_count(number, noun)}{share} {'is' if number == 1 else 'are'}"
