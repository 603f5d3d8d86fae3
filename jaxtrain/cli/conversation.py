"""A conversation on the terminal with a trained model."""

import sys
from collections.abc import Callable, Iterable, Iterator

from jaxtrain.data import replace_unprintable

Reply = Callable[..., Iterator[str]]
"""`reply(messages, seed=)` yields chunks of the answer to messages."""


def talk(reply: Reply, seed: int) -> None:
    """Answer the lines of a user until the end of the input.

    Args:
      reply: The model.
      seed: Seed of the first answer.
    """
    print("Ctrl-D ends the conversation, Ctrl-C an answer; an empty line starts a new conversation", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text.strip():
            messages = []
            continue
        messages.append(message("user", text))
        answer: list[str] = []
        try:
            print_chunks(_kept(reply(messages, seed=seed + len(messages) // 2), answer))
        except KeyboardInterrupt:
            print()
        messages.append(message("assistant", "".join(answer)))


def print_chunks(chunks: Iterable[str]) -> None:
    """Print a text chunk by chunk, as it is computed."""
    for text in chunks:
        sys.stdout.write(replace_unprintable(text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def message(role: str, text: str) -> dict[str, str]:
    """Return a message of a conversation."""
    return {"role": role, "content": text}


def _kept(chunks: Iterable[str], into: list[str]) -> Iterator[str]:
    for text in chunks:
        into.append(text)
        yield text
