"""Rows of tokens of equal length from one or two texts each, with their special tokens and padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.sources import Example, Source
from jaxtrain.data.text.tokenizer import Tokenizer, Tokens
from jaxtrain.errors import UserError


def pad_tokens(tokens: NDArray[np.integer[Any]], length: int, pad: int) -> tuple[Tokens, NDArray[np.bool_]]:
    """Truncate or pad tokens to a length.

    Args:
      tokens: Integer [N].
      length: Length of the row.
      pad: Padding token.

    Returns:
      A tuple (tokens int32 [length], mask bool [length], True at tokens).

    Example:
      >>> pad_tokens(np.array([7, 8]), 3, pad=0)
      (array([7, 8, 0], dtype=int32), array([ True,  True, False]))
    """
    row = np.full(length, pad, np.int32)
    truncated = tokens[:length]
    row[: len(truncated)] = truncated
    return row, np.arange(length) < len(truncated)


def encode_text(texts: Tokenizer, text: str, length: int) -> Tokens:
    """Return a text's tokens between start and end token, truncated or padded.

    Args:
      texts: Tokenizer.
      text: Text.
      length: Length of the row, at least 2.

    Returns:
      Tokens int32 [length].

    Example:
      >>> from jaxtrain.data import ByteTokenizer
      >>> encode_text(ByteTokenizer(), "abcdef", 4).tolist(), encode_text(ByteTokenizer(), "a", 4).tolist()
      ([257, 97, 98, 258], [257, 97, 258, 256])
    """
    start, end = texts.special("start"), texts.special("end")
    return pad_tokens(np.r_[start, texts.encode(text)[: length - 2], end], length, texts.special("pad"))[0]


def encode_row(texts: Tokenizer, row: Example, *, length: int, classes: Sequence[Any] = ()) -> Example:
    """Encode a text, and its label if there are classes.

    Args:
      texts: Tokenizer.
      row: `{"text": text}`, or `{"text": text, "label": label}`.
      length: Length of the row of tokens, at least 2.
      classes: Labels, in the order of their numbers.

    Returns:
      `{"tokens": int32 [length]}` as by `encode_text`, and with classes also `{"label": int32}`, its index.

    Raises:
      UserError: The label is not one of the classes.
    """
    if not classes:
        return {"tokens": encode_text(texts, str(row["text"]), length)}
    label = _plain(row["label"])
    if label not in classes:
        raise UserError(f"label {label!r} occurs only in the validation split: add training texts with it")
    return {"tokens": encode_text(texts, str(row["text"]), length), "label": np.int32(classes.index(label))}


def encode_pair(texts: Tokenizer, pair: Example, *, source_len: int, target_len: int) -> Example:
    """Encode a source and its target, each followed by the end token and padding.

    Args:
      texts: Tokenizer.
      pair: `{"source": text, "target": text}`.
      source_len: Length of the row of the source's tokens.
      target_len: Length of the row of the target's tokens.

    Returns:
      `{"source": int32 [source_len], "target": int32 [target_len]}`.

    Raises:
      UserError: A text does not fit: from a target without its end the model would learn not to stop.
    """
    return {
        "source": _encode_with_end(texts, str(pair["source"]), "source", source_len),
        "target": _encode_with_end(texts, str(pair["target"]), "target", target_len),
    }


def distinct_labels(rows: Source) -> list[Any]:
    """Return the different labels of rows `{"label": label}`, sorted.

    Example:
      >>> distinct_labels([{"label": np.int64(3)}, {"label": np.int64(1)}, {"label": np.int64(3)}])
      [1, 3]
    """
    return sorted({_plain(rows[i]["label"]) for i in range(len(rows))})


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label


def _encode_with_end(texts: Tokenizer, text: str, what: str, length: int) -> Tokens:
    tokens = np.append(texts.encode(text), texts.special("end"))
    if len(tokens) > length:
        raise UserError(
            f"the {what} {text!r} has {len(tokens)} tokens with its end token, more than {what}_len {length}: "
            f"increase {what}_len, or remove the pair"
        )
    return pad_tokens(tokens, length, texts.special("pad"))[0]
