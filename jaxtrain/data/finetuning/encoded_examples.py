"""Tokenization of examples, once for all processes and later commands."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.example_files import ExampleFiles
from jaxtrain.data.finetuning.loss_masks import encode_each
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.rows.masked_texts import EncodedExamples
from jaxtrain.data.shards.token_cache import TokenizedDocuments, tokenized
from jaxtrain.records import report_unread

# Of the tokens and masks of an example, or how they are derived: part of the key of the cache.
_VERSION = "masked tokens 3"


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
