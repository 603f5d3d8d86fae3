"""Texts as tokens, with a mask of those in the loss: what rows of fine-tuning are made from."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.shards.shard import TokenizedDocuments
from jaxtrain.data.text.tokenizer import Tokens
from jaxtrain.errors import UserError


class TextKind(Protocol):
    """A kind of examples, as far as their rows depend on it."""

    sides: ClassVar[int]
    """Number of texts of an example: 2 for a preference."""
    continues: ClassVar[bool]
    """Whether a text that is longer than a row continues in the next one, instead of losing its end."""


class Encoded(NamedTuple):
    """An example, or one of the two of a preference.

    Attributes:
      tokens: Tokens int32 [N].
      mask: Whether a token is in the loss, bool [N].
    """

    tokens: Tokens
    mask: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class EncodedExamples:
    """Examples as tokens with their masks. Item `i` is a text: an example, or one of the two of a preference.

    The chosen and the rejected text of preference `i` are the items `2 * i` and `2 * i + 1`. A conversation whose chat
    template rewrites earlier answers is several texts, one after the other.

    Attributes:
      coded: Twice every token, plus 1 where it is in the loss: one array holds both.
      kind: Type of the examples.
      numbers: Number of the example of every text, int [texts]; None if each is one text, or two of a preference.
      weights: Weight of every text in the loss, float [texts]; None for 1.

    Example:
      >>> from jaxtrain.data.finetuning import PlainText
      >>> coded = TokenizedDocuments(np.array([14, 17]), np.array([0, 2]))
      >>> [part.tolist() for part in EncodedExamples(coded, PlainText)[0]]
      [[7, 8], [False, True]]
    """

    coded: TokenizedDocuments
    kind: type[TextKind]
    numbers: NDArray[np.integer[Any]] | None = None
    weights: NDArray[np.floating[Any]] | None = None

    def __len__(self) -> int:
        return len(self.coded)

    def __getitem__(self, index: int, /) -> Encoded:
        return Encoded((self.coded[index] >> 1).astype(np.int32), self.mask(index))

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return whether each token of a text is in the loss, bool [N]."""
        return (self.coded[index] & 1).astype(bool)

    def weight(self, index: int) -> float:
        """Return the weight of a text in the loss."""
        return 1.0 if self.weights is None else float(self.weights[index])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of every text, int64 [texts]."""
        return np.diff(self.coded.offsets)


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """The tokens of encoded examples, as documents to pack."""

    examples: EncodedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> NDArray[np.integer[Any]]:
        return self.examples.coded[index] >> 1


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """The weight in the loss of every token of encoded examples, as documents to pack."""

    examples: EncodedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> NDArray[np.float32]:
        return self.examples.mask(index) * np.float32(self.examples.weight(index))


def check_kind(kind: type[TextKind], *, are_pairs: bool) -> None:
    """Raise `UserError` unless examples of a kind make rows of pairs, or rows of single texts."""
    if are_pairs and kind.sides != 2:
        raise UserError(f"the examples are of the kind {kind.__name__}: add the fields chosen and rejected")
    if not are_pairs and kind.sides == 2:
        raise UserError("the examples are preferences: use --loss dpo or --loss reward")
