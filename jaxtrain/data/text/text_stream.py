"""Decode tokens to text as they are generated."""

from collections.abc import Iterable, Iterator, Sequence

from jaxtrain.data.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens of a character's encoding that may be missing; UTF-8 needs at most three more bytes.
_INCOMPLETE = 4


def decode_stream(texts: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Decode a prompt and the tokens that follow it, in chunks whose concatenation is their text.

    A character may consist of several tokens; it is held back until it is complete. Each token costs the decoding of
    the last few tokens only, however long the text is.

    Args:
      texts: Tokenizer of the tokens.
      prompt: Tokens of the text so far.
      tokens: Tokens that follow it.

    Returns:
      An iterator of the prompt's text and the chunks after it. An incomplete character at the end is left out.

    Example:
      >>> from jaxtrain.data import ByteTokenizer
      >>> list(decode_stream(ByteTokenizer(), b"a ", "né".encode()))
      ['a ', 'n', 'é']
    """
    # Each chunk is decoded after the chunk before it: what a token decodes to may depend on its predecessors.
    context, pending = list(prompt), list[int]()
    yield texts.decode(context)
    for token in tokens:
        pending.append(token)
        chunk = _decode_after(texts, context, pending)
        if chunk.endswith(_REPLACEMENT):
            if len(pending) <= 2 * _INCOMPLETE:
                continue
            # Invalid rather than incomplete: emit all but what may still become a character.
            ready, pending = pending[:-_INCOMPLETE], pending[-_INCOMPLETE:]
            chunk = _decode_after(texts, context, ready)
        else:
            ready, pending = pending, []
        if chunk:
            yield chunk
        context = ready
    if rest := _decode_after(texts, context, pending).rstrip(_REPLACEMENT):
        yield rest


def replace_unprintable(text: str) -> str:
    """Replace invalid UTF-8 and control characters by "·", for output on a terminal.

    Example:
      >>> replace_unprintable("tab\\tbell\\a")
      'tab\\tbell·'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text).replace(_REPLACEMENT, "·")


def _decode_after(texts: Tokenizer, context: list[int], tokens: list[int]) -> str:
    return texts.decode([*context, *tokens])[len(texts.decode(context)) :]
