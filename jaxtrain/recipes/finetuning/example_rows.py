"""The examples of fine-tuning as rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtrain.data import MappedSource, PackedRows, Source
from jaxtrain.data.finetuning import (
    EncodedExamples,
    ExampleFiles,
    ModelTokenizer,
    PreferenceRows,
    RowSummary,
    WholeTexts,
    check_kind,
    duplicates,
    encode_examples,
    encode_labelled,
    label_numbers,
    labelled_rows,
    preference_rows,
    print_examples,
    remarks,
    reward_rows,
    supervised_rows,
)


@dataclass(frozen=True, eq=False)
class FineTuningRows:
    """Examples of a split, as the settings make rows of them.

    Args:
      files: The examples.
      texts: Tokenizer.
      length: Number of predictions of a row.
      are_pairs: Whether a row is a chosen and a rejected text.
      packing: Whether other rows hold as many examples as fit.
    """

    files: ExampleFiles
    texts: ModelTokenizer
    length: int
    are_pairs: bool
    packing: bool

    @cached_property
    def examples(self) -> EncodedExamples:
        """The examples as tokens."""
        check_kind(self.files.kind, are_pairs=self.are_pairs)
        return encode_examples(self.files, self.texts)

    @cached_property
    def _rows_and_summary(self) -> tuple[PackedRows | PreferenceRows, RowSummary]:
        pad = self.texts.special("pad")
        if self.are_pairs:
            return preference_rows(self.examples, self.length, pad)
        return supervised_rows(self.examples, self.length, pad, packing=self.packing)

    @property
    def rows(self) -> PackedRows | PreferenceRows:
        """The rows, those of preferences as pairs."""
        return self._rows_and_summary[0]

    @property
    def source(self) -> Source:
        """The rows; one of a pair has both texts one after the other."""
        return MappedSource(self.rows, flat_pair) if self.are_pairs else self.rows

    @property
    def bounds(self) -> dict[str, int]:
        """Exclusive upper bounds of the integers in a row, by name."""
        tokens = self.texts.size
        return {"tokens": tokens, "targets": tokens, "positions": self.length, "segments": self.length + 1}

    @property
    def summary(self) -> list[str]:
        """What the rows hold of the examples, and what is worth knowing of them, as sentences."""
        return [*self._rows_and_summary[1].lines(), *remarks(self.examples, self.texts)]

    @property
    def has_messages(self) -> bool:
        """Whether the examples are messages, which the chat template renders."""
        first = self.files[0]
        return hasattr(first, "messages") or not isinstance(getattr(first, "prompt", ""), str)


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Examples of a split as rows: preferences, or texts with one of `labels`."""

    files: ExampleFiles
    texts: ModelTokenizer
    length: int
    pad: int
    labels: tuple[str, ...]

    @cached_property
    def _rows(self) -> tuple[WholeTexts, RowSummary]:
        if not self.labels:
            check_kind(self.files.kind, are_pairs=True)
            return reward_rows(encode_examples(self.files, self.texts), self.length, self.pad)
        numbers = label_numbers(self.files, self.labels)
        return labelled_rows(encode_labelled(self.files, self.texts), numbers, self.labels, self.length, self.pad)

    @property
    def rows(self) -> WholeTexts:
        """The rows as they are printed."""
        return self._rows[0]

    @property
    def source(self) -> Source:
        """The rows; one of a preference has both texts one after the other."""
        return self.rows if self.labels else MappedSource(self.rows, flat_pair)

    @property
    def summary(self) -> list[str]:
        """What the rows hold of the examples, as sentences."""
        return self._rows[1].lines()

    def baselines(self) -> dict[str, str]:
        """Return the accuracy of the most frequent label."""
        counts = self._rows[1].labels
        name = max(counts, key=counts.__getitem__)
        return {"accuracy to be beaten": f"{counts[name] / len(self.rows):.3f} by the most frequent label, {name}"}

    def show(self) -> None:
        """Print the first examples, and the summary."""
        print_examples(self.rows, self.texts, labels=self.labels)
        print(*self.summary, sep="\n")


def summaries(train: FineTuningRows, held_out: FineTuningRows) -> dict[str, list[str]]:
    """Return the summaries of both splits by their names, with the number of examples that are in both."""
    both = duplicates(held_out.examples, train.examples)
    shared = [f"{both:,} of them {'is' if both == 1 else 'are'} also in the training data"] if both else []
    return {"examples": train.summary, "held out": [*held_out.summary, *shared]}


def show(train: FineTuningRows, held_out: FineTuningRows) -> None:
    """Print the first examples, and the summaries."""
    print_examples(train.rows, train.texts)
    for name, sentences in summaries(train, held_out).items():
        print(f"{name}:", *sentences, sep="\n  ")


def flat_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair [2, T] as one row [2 · T]."""
    return {name: x.reshape(-1) for name, x in pair.items()}
