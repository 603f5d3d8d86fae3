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
from jaxtrain.data.shards.token_cache import tokenized
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

    numbers, weights, unread = array("I"), array("f"), set[str]()

    def coded() -> Iterator[NDArray[np.integer[Any]]]:
        del numbers[:], weights[:]
        unread.clear()
        parsed = (examples[i] for i in range(len(examples)))
        for number, (example, encoded) in enumerate(encode_each(parsed, texts)):
            unread.update(example.unread)
            for tokens, mask in encoded:
                numbers.append(number)
                weights.append(example.weight)
                yield 2 * tokens.astype(np.int64) + mask

    def beside() -> dict[str, NDArray[Any]]:
        of_texts = {"numbers": np.array(numbers, np.uint32), "weights": np.array(weights, np.float32)}
        return {**of_texts, "unread": to_bytes(unread)}

    key = [_VERSION, examples.kind.__name__, *texts.identity(), *examples.identity()]
    stored = tokenized(key, coded, np.uint32, beside)
    report_unread(examples.place, from_bytes(stored.beside["unread"]))
    return EncodedExamples(stored, examples.kind, stored.beside["numbers"], stored.beside["weights"])


def to_bytes(names: Iterable[str]) -> NDArray[np.uint8]:
    """Return names as an array to store beside tokens."""
    return np.frombuffer("\0".join(sorted(names)).encode("utf-8", "backslashreplace"), np.uint8)


def from_bytes(stored: NDArray[np.uint8]) -> list[str]:
    """Return the names of `to_bytes`.

    Example:
      >>> from_bytes(to_bytes({"source", "id"}))
      ['id', 'source']
    """
    return [name for name in bytes(stored).decode().split("\0") if name]
