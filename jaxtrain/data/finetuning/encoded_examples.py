"""Examples as tokens and masks, in one memory-mapped array that is shared by processes and later commands."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.example_files import ExampleFiles
from jaxtrain.data.finetuning.examples import FineTuningExample, Preference
from jaxtrain.data.finetuning.masks import Encoded, encode_each
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.token_cache import TokenizedDocuments, tokenized

# Of the tokens and masks of an example, or how they are derived: part of the key of the cache.
_VERSION = "masked tokens 1"


@dataclass(frozen=True, eq=False)
class EncodedExamples:
    """Examples as tokens with their masks. Item `i` is a text: an example, or one of the two of a preference.

    The chosen and the rejected text of preference `i` are the items `2 * i` and `2 * i + 1`.

    Attributes:
      coded: Twice every token, plus 1 where it is in the loss: one array holds both.
      kind: Type of the examples.

    Example:
      >>> from jaxtrain.data.finetuning import PlainText
      >>> coded = TokenizedDocuments(np.array([14, 17]), np.array([0, 2]))
      >>> [part.tolist() for part in EncodedExamples(coded, PlainText)[0]]
      [[7, 8], [False, True]]
    """

    coded: TokenizedDocuments
    kind: type[FineTuningExample]

    def __len__(self) -> int:
        return len(self.coded)

    def __getitem__(self, index: int, /) -> Encoded:
        return Encoded((self.coded[index] >> 1).astype(np.int32), self.mask(index))

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return whether each token of a text is in the loss, bool [N]."""
        return (self.coded[index] & 1).astype(bool)

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
class MaskDocuments:
    """The masks of encoded examples, as those of documents to pack."""

    examples: EncodedExamples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> NDArray[np.integer[Any]]:
        return self.examples.coded[index] & 1


def encode_examples(examples: ExampleFiles, texts: ModelTokenizer) -> EncodedExamples:
    """Tokenize examples once, into the token cache.

    Later calls for unchanged files, tokenizer and template read the tokens from there, memory-mapped.

    Args:
      examples: The examples.
      texts: Tokenizer.

    Returns:
      The examples as tokens, in their order.

    Raises:
      UserError: An example is malformed or refused by the template; the message names its file and line.
    """

    def coded() -> Iterator[NDArray[np.integer[Any]]]:
        for encoded in encode_each((examples[i] for i in range(len(examples))), texts):
            for tokens, mask in encoded:
                yield 2 * tokens.astype(np.int64) + mask

    key = [_VERSION, examples.kind.__name__, *texts.identity(), *examples.identity()]
    return EncodedExamples(tokenized(key, coded, np.min_scalar_type(2 * texts.size)), examples.kind)


def texts_per_example(kind: type[FineTuningExample]) -> int:
    """Return the number of texts of an example of a kind."""
    return 2 if kind is Preference else 1
