"""What is worth knowing of encoded examples before a run: empty answers, answers without an end, and duplicates."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.examples import PlainText
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.rows.masked_texts import EncodedExamples
from jaxtrain.data.rows.row_summary import counted

_SHORT = 16  # an answer of more tokens is not empty


def remarks(examples: EncodedExamples, texts: ModelTokenizer) -> list[str]:
    """Return sentences on answers that are empty, or have no special token that ends them; none for plain texts.

    Args:
      examples: Encoded examples.
      texts: Tokenizer.
    """
    if examples.kind is PlainText:
        return []
    special = texts.special_ids()
    empty = endless = 0
    for i in range(len(examples)):
        tokens, mask = examples[i]
        in_loss = tokens[mask]
        if len(in_loss):
            empty += len(in_loss) <= _SHORT and _is_empty(in_loss, texts)
            endless += not np.isin(in_loss, special).any()
    found = []
    if empty:
        found.append(f"{counted(empty, 'answer')} {'is' if empty == 1 else 'are'} empty")
    if endless:
        found.append(
            f"{counted(endless, 'answer')} {'has' if endless == 1 else 'have'} no special token in the loss, such as"
            " eos_token: the model does not learn where they end"
        )
    return found


def duplicates(examples: EncodedExamples, others: EncodedExamples) -> int:
    """Return how many examples are also among others, token by token.

    Args:
      examples: Encoded examples; each text of a divided conversation is one.
      others: Examples of the same kind.

    Example:
      >>> from jaxtrain.data import TokenizedDocuments
      >>> train = EncodedExamples(TokenizedDocuments(np.array([14, 17, 3, 5]), np.array([0, 2, 4])), PlainText)
      >>> held_out = EncodedExamples(TokenizedDocuments(np.array([14, 17, 17]), np.array([0, 2, 3])), PlainText)
      >>> duplicates(held_out, train)
      1
    """
    keys = Counter(_keys(examples))
    return sum(keys.pop(key, 0) for key in _keys(others))


def _keys(examples: EncodedExamples) -> list[int]:
    per_example = examples.kind.sides
    return [
        hash(tuple(_bytes(examples.coded[i]) for i in range(first, first + per_example)))
        for first in range(0, len(examples), per_example)
    ]


def _bytes(coded: NDArray[np.integer]) -> bytes:
    return coded.astype(np.uint32).tobytes()


def _is_empty(tokens: NDArray[np.int32], texts: ModelTokenizer) -> bool:
    text = texts.decode(tokens)
    return not text.replace("<think>", "").replace("</think>", "").strip()
