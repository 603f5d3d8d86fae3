"""Examples as tokens and masks, in one memory-mapped array that is shared by processes and later commands."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.example_files import ExampleFiles
from jaxtrain.data.finetuning.examples import FineTuningExample, Preference
from jaxtrain.data.finetuning.masks import Encoded, encode_each
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.token_cache import TokenizedDocuments, tokenized
from jaxtrain.records import report_unread

# Of the tokens and masks of an example, or how they are derived: part of the key of the cache.
_VERSION = "masked tokens 3"


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
    kind: type[FineTuningExample]
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


def encode_examples(examples: ExampleFiles, texts: ModelTokenizer) -> EncodedExamples:
    """Tokenize examples once, into the token cache.

    Later calls for unchanged files, tokenizer and template read the tokens from there, memory-mapped. Each call
    warns of the fields that are not read, in one line.

    Args:
      examples: The examples.
      texts: Tokenizer.

    Returns:
      The examples as tokens, in their order.

    Raises:
      UserError: An example is malformed or refused by the template; the message names its file and line.
    """

    def coded() -> Iterator[NDArray[np.integer[Any]]]:
        numbers, weights, unread = array("I"), array("f"), set[str]()
        parsed = (examples[i] for i in range(len(examples)))
        for number, (example, encoded) in enumerate(encode_each(parsed, texts)):
            unread.update(example.unread)
            for tokens, mask in encoded:
                numbers.append(number)
                weights.append(example.weight)
                yield 2 * tokens.astype(np.int64) + mask
        yield np.frombuffer(numbers, np.uint32)
        yield np.frombuffer(weights, np.uint32)
        yield as_document(unread)

    key = [_VERSION, examples.kind.__name__, *texts.identity(), *examples.identity()]
    stored = tokenized(key, coded, np.uint32)
    # The last three documents are the numbers and weights of the texts, and the fields that were not read.
    numbers, weights, unread = (stored[len(stored) - i] for i in (3, 2, 1))
    report_unread(examples.place, names_in(unread))
    only_texts = TokenizedDocuments(stored.tokens, stored.offsets[:-3])
    return EncodedExamples(only_texts, examples.kind, numbers, weights.view(np.float32))


def as_document(names: Iterable[str]) -> NDArray[np.uint8]:
    """Return names as a document of the token cache."""
    return np.frombuffer("\0".join(sorted(names)).encode("utf-8", "backslashreplace"), np.uint8)


def names_in(document: NDArray[np.integer[Any]]) -> list[str]:
    """Return the names of `as_document`.

    Example:
      >>> names_in(as_document({"source", "id"}))
      ['id', 'source']
    """
    return [name for name in bytes(document.astype(np.uint8)).decode().split("\0") if name]


def texts_per_example(kind: type[FineTuningExample]) -> int:
    """Return the number of texts of an example of a kind."""
    return 2 if kind is Preference else 1
