"""Texts of many lengths in rows of one: padded, one text to a row, or packed, several to a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.source import Example
from jaxtrain.data.tokens import Tokens
from jaxtrain.errors import UserError


class Documents(Protocol):
    """Texts by number: anything with a length whose items are tokens, int [N]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.integer[Any]]: ...


class Piece(NamedTuple):
    """The predictions `start` to `stop` of a document: from each of its tokens but the last the one after it."""

    document: int
    start: int
    stop: int


def padded(tokens: Tokens, length: int, pad: int) -> tuple[Tokens, NDArray[np.bool_]]:
    """(int32 [length], bool [length]): the tokens, cut to `length` or filled up with `pad`; where they are tokens.

    >>> padded(np.array([7, 8]), 3, pad=0)
    (array([7, 8, 0], dtype=int32), array([ True,  True, False]))
    """
    row = np.full(length, pad, np.int32)
    kept = tokens[:length]
    row[: len(kept)] = kept
    return row, np.arange(length) < len(kept)


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of `length` predictions, each of one or several documents: the rows of `pack`.

    Item `i` is `{"tokens", "targets", "segments", "positions"}`, int32 [length] each: `targets[t]` is what comes after
    `tokens[t]` in its document, `segments` counts a row's documents from 1, `positions` a document's tokens from 0.
    What is left of a row is segment 0, and its targets are not to be learned.
    """

    documents: Documents
    rows: tuple[tuple[Piece, ...], ...]
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = {name: np.zeros(self.length, np.int32) for name in ("tokens", "targets", "segments", "positions")}
        row["tokens"][:] = row["targets"][:] = self.pad
        end = 0
        for segment, (document, start, stop) in enumerate(self.rows[index], 1):
            tokens = self.documents[document]
            place, end = slice(end, end + stop - start), end + stop - start
            row["tokens"][place], row["targets"][place] = tokens[start:stop], tokens[start + 1 : stop + 1]
            # A piece that goes on where another stopped does not see what came before: for it the text begins here.
            row["segments"][place], row["positions"][place] = segment, np.arange(stop - start)
        return row


def pack(documents: Documents, length: int, pad: int) -> Packed:
    """The predictions of all documents, each once, in as few rows of `length` as first-fit finds.

    A document with more predictions than a row holds is cut. The rows depend on the documents' lengths and order
    alone, so that a position in the data is the number of a row.

    >>> documents = [np.arange(4), np.arange(10, 18), np.arange(20, 22)]
    >>> packed = pack(documents, length=5, pad=0)
    >>> packed[0]["tokens"].tolist(), packed[0]["targets"].tolist(), packed[0]["segments"].tolist()
    ([0, 1, 2, 15, 16], [1, 2, 3, 16, 17], [1, 1, 1, 2, 2])
    >>> len(packed)
    3

    Raises UserError if `length` is below 1 or no document has two tokens.
    """
    if length < 1:
        raise UserError(f"the length of a row is {length}: choose 1 or more")
    pieces = [
        Piece(d, start, min(start + length, count))
        for d, count in enumerate(len(documents[d]) - 1 for d in range(len(documents)))
        for start in range(0, count, length)
    ]
    if not pieces:
        raise UserError(f"none of {len(documents)} texts has two tokens, one to predict from the other: give longer")
    rows = first_fit([stop - start for _, start, stop in pieces], length)
    return Packed(documents, tuple(tuple(pieces[p] for p in row) for row in rows), length, pad)


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """The indices of `sizes` in bins of `capacity`: each in turn in the first bin that has room for it.

    In O(n log n), by a tournament over the room that is left (Johnson 1974).

    >>> first_fit([3, 4, 2, 1, 1], capacity=5)
    [[0, 2], [1, 3], [4]]
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = np.full(2 * leaves, capacity).tolist()  # of a node's bins the most; its children are 2n and 2n + 1
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
