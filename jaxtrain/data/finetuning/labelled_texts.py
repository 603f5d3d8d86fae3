"""Texts with labels, for a classifier.

A row has the field `label`, a text or a whole number, and is otherwise an example with one text: `text`; `prompt` and
`completion`; or `messages`, which the chat template renders. The tokens are those that the tokenizer gives the text,
with the special tokens that it adds by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.finetuning.encoded_examples import from_bytes, to_bytes
from jaxtrain.data.finetuning.example_files import ExampleFiles
from jaxtrain.data.finetuning.examples import Completion, Conversation, Messages, PlainText, parse_example
from jaxtrain.data.finetuning.model_tokenizer import ModelTokenizer
from jaxtrain.data.finetuning.template_fields import unread_of
from jaxtrain.data.shards.shard import TokenizedDocuments
from jaxtrain.data.shards.token_cache import tokenized
from jaxtrain.errors import UserError
from jaxtrain.records import report_unread

_BATCH = 64  # texts that are tokenized at once
# Of the tokens of a text, or how they are derived: part of the key of the cache.
_VERSION = "labelled texts 2"
_LISTED = 10


@dataclass(frozen=True)
class LabelledText:
    """A text, or messages, with a label.

    Attributes:
      text: Text or messages.
      label: The label.
      tools: Tools, as JSON Schemas; None if there are none.
      where: Where it is, for messages.
      unread: Names of the fields of the row that are not read.
    """

    text: str | Messages
    label: str | int
    tools: list[Any] | None
    where: str
    unread: tuple[str, ...] = ()


def parse_labelled(row: Mapping[str, Any], where: str) -> LabelledText:
    """Return the labelled text in a row of a file.

    Args:
      row: Values by field.
      where: Where the row is, for messages.

    Raises:
      UserError: The row has no label or no text, or one of them is malformed.

    Example:
      >>> parse_labelled({"text": "Fine.", "label": "good"}, "a.jsonl, line 1").label
      'good'
    """
    label = row.get("label")
    label = label.item() if isinstance(label, np.generic) else label
    if not isinstance(label, str | int):
        what = "no label" if label is None else f"the label {label!r}"
        raise UserError(f"{where} has {what}: add the field label, a text or a whole number")
    example = parse_example({name: value for name, value in row.items() if name != "label"}, where)
    if isinstance(example, PlainText):
        return LabelledText(example.text, label, None, where, example.unread)
    if isinstance(example, Conversation):
        return LabelledText(example.messages, label, example.tools, where, example.unread)
    if isinstance(example, Completion):
        # Both are texts, or both messages.
        whole: Any = example.prompt + example.completion  # type: ignore[operator]
        return LabelledText(whole, label, example.tools, where, example.unread)
    raise UserError(f"{where} is a preference, which has two texts: give one text with a label")


def encode_labelled(examples: ExampleFiles, texts: ModelTokenizer) -> TokenizedDocuments:
    """Tokenize labelled texts once, into the token cache.

    Args:
      examples: The texts, read with `parse_labelled`.
      texts: Tokenizer.

    Returns:
      Their tokens, in their order.

    Raises:
      UserError: A text is malformed or refused by the template; the message names its file and line.
    """

    unread: set[str] = set()

    def documents() -> Iterator[NDArray[np.integer[Any]]]:
        unread.clear()
        parsed = (examples[i] for i in range(len(examples)))
        while batch := [*islice(parsed, _BATCH)]:
            yield from _encode(batch, texts, unread)

    key = [_VERSION, *texts.identity(), *examples.identity()]
    stored = tokenized(key, documents, np.min_scalar_type(texts.size), lambda: {"unread": to_bytes(unread)})
    report_unread(examples.place, from_bytes(stored.beside["unread"]))
    return stored


def label_names(examples: ExampleFiles) -> tuple[str, ...]:
    """Return the different labels of examples: numbers in their order, texts in alphabetical order.

    Raises:
      UserError: There is one label only, or some are numbers and others texts.
    """
    found = {label if isinstance(label, str) else int(label) for label in _labels(examples)}
    if len({type(label) for label in found}) > 1:
        raise UserError(f"the labels of {examples.files[0]} are numbers and texts: write all alike")
    if len(found) < 2:
        raise UserError(f"{examples.files[0]} must have two or more labels, got {_listed(found)}: add another")
    return tuple(map(str, sorted(found)))


def label_numbers(examples: ExampleFiles, names: Sequence[str]) -> NDArray[np.int32]:
    """Return the number of the label of every example, int32 [N].

    Args:
      examples: The examples.
      names: Names of the labels. A label is one of them, or the number of one.

    Raises:
      UserError: A label is neither; the message names its file and line.
    """
    by_name = {name: i for i, name in enumerate(names)}
    numbers = np.empty(len(examples), np.int32)
    for i, label in enumerate(_labels(examples)):
        number = by_name.get(str(label), label)
        if isinstance(number, str) or not 0 <= number < len(names):
            raise UserError(f"{examples[i].where}: label {label!r} is unknown: use one of {_listed(names)}")
        numbers[i] = number
    return numbers


def _labels(examples: ExampleFiles) -> Iterator[str | int]:
    return (examples[i].label for i in range(len(examples)))


def _listed(labels: Any) -> str:
    shown = [str(label) for label in labels]
    return ", ".join(shown[:_LISTED]) + (f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else "")


def _encode(
    examples: Sequence[LabelledText], texts: ModelTokenizer, unread: set[str]
) -> list[NDArray[np.integer[Any]]]:
    """Return the tokens of examples, and add the names of fields that are not read to `unread`."""
    rendered = [_rendered(example, texts, unread) for example in examples]
    # A chat template writes all special tokens.
    encodings = texts.encodings(rendered, [not isinstance(example.text, str) for example in examples])
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _rendered(example: LabelledText, texts: ModelTokenizer, unread: set[str]) -> str:
    unread.update(example.unread)
    if isinstance(example.text, str):
        return example.text
    try:
        template = texts.chat_template(example.tools).recording()
        text = template.render(example.text, example.tools)
        unread.update(unread_of(template, example.text, example.tools))
    except UserError as error:
        raise UserError(f"{example.where}: {error}") from None
    return text
