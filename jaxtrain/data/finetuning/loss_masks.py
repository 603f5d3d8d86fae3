"""Examples as tokens, with a mask of those that the model learns to write.

The texts of an example and the spans in the loss are those of `rendering`; every token with a character of a span is
in the loss. So it is in `return_assistant_tokens_mask` of `transformers` since 5.24, except where a tokenizer removes
spaces from its offsets: there white space at the end of a `{% generation %}` block is missing. Before 5.24 only the
tokens of a block's first and last characters were looked up: if the first was such a space, neither the block nor those
after it were in the loss; if the last was, so was the text after the block; and of a last character in several tokens
only the first was.

Around plain texts, and prompts and completions that are texts, stand the special tokens that the tokenizer adds, and
`eos_token` is last; around messages, what the template writes, and no more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.chat_template import Span
from jaxtrain.data.finetuning.examples import FineTuningExample
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.finetuning.rendering import Rendered, render_example
from jaxtrain.data.rows.masked_texts import Encoded
from jaxtrain.data.text.tokenizer import Tokens

_BATCH = 64  # texts that are tokenized at once


def encode_example(example: FineTuningExample, texts: ModelTokenizer) -> tuple[Encoded, ...]:
    """Return an example as the tokens of one text, or of several where a chat template rewrites earlier answers.

    A preference has two, the chosen and the rejected one.

    Args:
      example: Example of any kind.
      texts: Tokenizer.

    Raises:
      UserError: The template refuses the example or is not stable, or the tokenizer has no `eos_token`.
    """
    _, encoded = next(encode_each([example], texts))
    return encoded


def encode_each(
    examples: Iterable[FineTuningExample], texts: ModelTokenizer
) -> Iterator[tuple[FineTuningExample, tuple[Encoded, ...]]]:
    """Yield examples with what `encode_example` returns, tokenized in several threads.

    `unread` also has the fields of messages that the chat template does not read.
    """
    iterator = iter(examples)
    while batch := [(example, render_example(example, texts)) for example in islice(iterator, _BATCH)]:
        flat = [rendered for _, several in batch for rendered in several]
        encoded = iter(_encode(flat, texts))
        for example, several in batch:
            unread = (*example.unread, *(name for one in several for name in one.unread))
            yield replace(example, unread=unread), tuple(islice(encoded, len(several)))


def _encode(rendered: Sequence[Rendered], texts: ModelTokenizer) -> list[Encoded]:
    encodings = texts.encodings([one.text for one in rendered], [one.is_whole for one in rendered])
    return [_masked(one, encoding, texts) for one, encoding in zip(rendered, encodings, strict=True)]


def _masked(rendered: Rendered, encoding: Any, texts: ModelTokenizer) -> Encoded:
    tokens, offsets = _apart(rendered, encoding, texts)
    mask = _span_mask(offsets, rendered.spans)
    if rendered.is_whole:
        return Encoded(tokens, mask)
    end = texts.special("end")
    if not len(tokens) or tokens[-1] != end:
        tokens, mask = np.append(tokens, np.int32(end)), np.append(mask, True)
    mask[-1] = True
    return Encoded(tokens, mask)


def _apart(rendered: Rendered, encoding: Any, texts: ModelTokenizer) -> tuple[Tokens, NDArray[np.int64]]:
    """Return the tokens of a text and their offsets, int64 [N, 2], none with characters on both sides of a cut."""
    offsets, cut = _offsets(encoding), rendered.cut
    if cut is None or not ((offsets[:, 0] < cut) & (cut < offsets[:, 1])).any():
        return np.array(encoding.ids, np.int32), offsets
    before, after = texts.encodings([rendered.text[:cut], rendered.text[cut:]], [True, True])
    return np.array(before.ids + after.ids, np.int32), np.concatenate([_offsets(before), _offsets(after) + cut])


def _offsets(encoding: Any) -> NDArray[np.int64]:
    return np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _span_mask(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that have a character of a span."""
    starts, stops = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), bool)
    for start, stop in spans:
        # The offsets of a token of white space may be empty: then it ends where they are.
        mask |= (stops > start) & ((starts < stop) | ((starts == stops) & (stops == stop)))
    return mask
