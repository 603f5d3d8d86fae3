"""Rows of fixed length from texts of any length: padded, one text per row, or packed, several per row.

grain's `FirstFitPackIterDataset` (0.2) was tried and not adopted. It refuses a text longer than a row, which `pack`
divides; it packs within a window of open rows, so that 300 texts of 2 to 59 tokens took 182 rows of 64 tokens with 8
open rows and 167 with 64, where `pack` takes 158; and it has no length and no random access, so that rows can be
neither shuffled nor counted, and a position is not a row number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.sources import Example
from jaxtrain.errors import UserError


class Documents(Protocol):
    """Anything with a length whose items are the tokens of a text, int [N]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.integer[Any]]: ...


class Weights(Protocol):
    """Anything with a length whose items are the weights in the loss of the tokens of a text, float [N]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.floating[Any]]: ...


class Piece(NamedTuple):
    """Predictions `start` to `stop` of a document; prediction i is that of token i + 1."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of `length` predictions, each from one or several documents, as `pack` creates them.

    Item `i` is `{"tokens", "targets", "segments", "positions"}`, int32 [length] each: `targets[t]` is the token after
    `tokens[t]` in its document, `segments` numbers the documents of a row from 1, `positions` the tokens of a document
    from 0. Padding is segment 0, and its targets must be masked.

    With `weights`, those in the loss of every token of every document, there is also `"weight"`, float32 [length]: that
    of the target, 0 at padding.
    """

    documents: Documents
    rows: tuple[tuple[Piece, ...], ...]
    length: int
    pad: int
    weights: Weights | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        names = ("tokens", "targets", "segments", "positions")
        row: Example = {name: np.zeros(self.length, np.int32) for name in names}
        row["tokens"][:] = row["targets"][:] = self.pad
        if self.weights is not None:
            row["weight"] = np.zeros(self.length, np.float32)
        end = 0
        for segment, (document, start, stop) in enumerate(self.rows[index], 1):
            tokens = self.documents[document]
            columns, end = slice(end, end + stop - start), end + stop - start
            row["tokens"][columns], row["targets"][columns] = tokens[start:stop], tokens[start + 1 : stop + 1]
            # A later piece of a document does not attend to the earlier ones, so its positions start at 0 too.
            row["segments"][columns], row["positions"][columns] = segment, np.arange(stop - start)
            if self.weights is not None:
                row["weight"][columns] = self.weights[document][start + 1 : stop + 1]
        return row


def pack(documents: Documents, length: int, pad: int) -> PackedRows:
    """Pack the predictions of all documents, each once, into rows by first-fit.

    A document with more predictions than a row has is divided. The rows depend on the lengths and the order of the
    documents only, so that a row number is a resumable position.

    Args:
      documents: Tokens of every text.
      length: Number of predictions of a row.
      pad: Padding token.

    Returns:
      The rows, a source.

    Raises:
      UserError: `length` is less than 1, or no document has two tokens.

    Example:
      >>> documents = [np.arange(4), np.arange(10, 18), np.arange(20, 22)]
      >>> packed = pack(documents, length=5, pad=0)
      >>> packed[0]["tokens"].tolist(), packed[0]["targets"].tolist(), packed[0]["segments"].tolist()
      ([0, 1, 2, 15, 16], [1, 2, 3, 16, 17], [1, 1, 1, 2, 2])
      >>> len(packed)
      3
    """
    check_length(length)
    pieces = [
        Piece(d, start, min(start + length, count))
        for d, count in enumerate(len(documents[d]) - 1 for d in range(len(documents)))
        for start in range(0, count, length)
    ]
    if not pieces:
        raise UserError(f"none of {len(documents)} texts has two tokens: use longer texts")
    return PackedRows(documents, pack_pieces(pieces, length), length, pad)


def pack_pieces(pieces: Sequence[Piece], length: int) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of every row by first-fit; each has at most `length` predictions."""
    rows = first_fit([stop - start for _, start, stop in pieces], length)
    return tuple(tuple(pieces[p] for p in row) for row in rows)


def check_length(length: int) -> None:
    """Raise UserError for a row without predictions."""
    if length < 1:
        raise UserError(f"the length of a row must be at least 1, got {length}")


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign items to bins, each in turn to the first bin with enough room, in O(n log n) (Johnson 1974).

    Args:
      sizes: Sizes of the items, at most `capacity` each.
      capacity: Capacity of a bin.

    Returns:
      The indices of the items of every bin.

    Example:
      >>> first_fit([3, 4, 2, 1, 1], capacity=5)
      [[0, 2], [1, 3], [4]]
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = np.full(2 * leaves, capacity).tolist()  # largest room below each node; the children of n are 2n and 2n + 1
    bins: list[list[int]] = []
    for i, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(i)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins
