"""What rows hold of the examples they are made from, in sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_REASONS = {
    "unanswered": "without a token in the loss",
    "cut_away": "whose answer starts after the end of a row",
    "weightless": "of weight 0",
    "too_long": "with a text longer than a row",
    "empty": "without a token",
}


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """What rows hold of their examples.

    Attributes:
      examples: Number of examples; every part of a divided conversation is one.
      tokens: Number of their tokens.
      rows: Number of rows.
      length: Number of predictions of a row; of tokens, if a head reads whole texts.
      loss_tokens: Number of tokens in the loss; None if a head reads whole texts.
      cut_examples: Number of examples that are longer than a row and lose their end, but are in the rows.
      cut_tokens: Number of the tokens of these that are not in the rows.
      cut_loss_tokens: Number of these tokens that would be in the loss.
      unanswered: Number of examples that are not in the rows as they have no token in the loss; of a preference, if one
        of the two texts has none.
      cut_away: Number of those whose tokens in the loss are all behind the first `length + 1`.
      weightless: Number of those of weight 0.
      too_long: Number of preferences that a head does not read, as a text is longer than a row.
      empty: Number of texts that a head does not read, as they have no token; of preferences, if one of both has none.
      dropped_tokens: Number of the tokens of these five.
      divided: Number of conversations that are several examples, since the chat template rewrites earlier answers.
      parts: Number of these examples.
      labels: Number of the examples in the rows with each label.
    """

    examples: int
    tokens: int
    rows: int
    length: int
    loss_tokens: int | None = None
    cut_examples: int = 0
    cut_tokens: int = 0
    cut_loss_tokens: int = 0
    unanswered: int = 0
    cut_away: int = 0
    weightless: int = 0
    too_long: int = 0
    empty: int = 0
    dropped_tokens: int = 0
    divided: int = 0
    parts: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def dropped_examples(self) -> int:
        """Number of examples that are not in the rows."""
        return sum(getattr(self, name) for name in _REASONS)

    def lines(self) -> list[str]:
        """Return the summary as sentences.

        Example:
          >>> summary = RowSummary(
          ...     examples=9, tokens=1000, loss_tokens=400, rows=8, length=128, cut_examples=2, cut_tokens=30,
          ...     cut_loss_tokens=20, unanswered=1, weightless=1, dropped_tokens=70, divided=1, parts=3,
          ... )
          >>> print(*summary.lines(), sep="\\n")
          9 examples of 1,000 tokens in 8 rows of 128: 400 tokens (40.0%) are in the loss
          1 conversation is 3 of these examples, since the chat template rewrites earlier answers
          2 examples (22.2%) are longer than a row: 30 tokens (3.0%) are cut off at their end, 20 of them in the loss
          2 examples (22.2%) are dropped, with 70 tokens (7.0%): 1 without a token in the loss, 1 of weight 0
        """
        held = (
            f"{counted(self.examples, 'example')} of {counted(self.tokens, 'token')} in {counted(self.rows, 'row')} of"
        )
        lines = [f"{held} {self.length:,}"]
        if self.loss_tokens is not None:
            lines[0] += f": {_share(self.loss_tokens, self.tokens, 'token')} in the loss"
        if self.divided:
            verb = "is" if self.divided == 1 else "are"
            lines.append(
                f"{counted(self.divided, 'conversation')} {verb} {self.parts:,} of these examples, since the chat"
                " template rewrites earlier answers"
            )
        if self.cut_examples:
            in_loss = "" if self.loss_tokens is None else f", {self.cut_loss_tokens:,} of them in the loss"
            lines.append(
                f"{_share(self.cut_examples, self.examples, 'example')} longer than a row:"
                f" {_share(self.cut_tokens, self.tokens, 'token')} cut off at their end{in_loss}"
            )
        if self.dropped_examples:
            dropped = _share(self.dropped_tokens, self.tokens, "token").rpartition(" ")[0]
            lines.append(
                f"{_share(self.dropped_examples, self.examples, 'example')} dropped, with {dropped}:"
                f" {reasons(vars(self))}"
            )
        if self.labels:
            lines.append(f"labels: {', '.join(f'{name} {count:,}' for name, count in self.labels.items())}")
        return lines


def reasons(counts: Mapping[str, int]) -> str:
    """Return why examples are dropped, by the names of the fields of `RowSummary`."""
    return ", ".join(f"{counts[name]:,} {reason}" for name, reason in _REASONS.items() if counts[name])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it is not 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _share(number: int, total: int, noun: str) -> str:
    share = f" ({number / total:.1%})" if total else ""
    return f"{counted(number, noun)}{share} {'is' if number == 1 else 'are'}"
