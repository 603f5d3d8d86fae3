"""What rows hold of the examples they are made from, in sentences."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """What rows hold of their examples.

    Attributes:
      examples: Number of examples; every part of a divided conversation is one.
      tokens: Number of their tokens.
      loss_tokens: Number of tokens in the loss.
      rows: Number of rows.
      length: Number of predictions of a row.
      cut_examples: Number of examples that are longer than a row and lose their end, but are in the rows.
      cut_tokens: Number of the tokens of these that are not in the rows.
      cut_loss_tokens: Number of these tokens that would be in the loss.
      unanswered: Number of examples that are not in the rows as they have no token in the loss; of a preference, if one
        of the two texts has none.
      cut_away: Number of those whose tokens in the loss are all behind the first `length + 1`.
      weightless: Number of those of weight 0.
      dropped_tokens: Number of the tokens of these three.
      divided: Number of conversations that are several examples, since the chat template rewrites earlier answers.
      parts: Number of these examples.
    """

    examples: int
    tokens: int
    loss_tokens: int
    rows: int
    length: int
    cut_examples: int = 0
    cut_tokens: int = 0
    cut_loss_tokens: int = 0
    unanswered: int = 0
    cut_away: int = 0
    weightless: int = 0
    dropped_tokens: int = 0
    divided: int = 0
    parts: int = 0

    @property
    def dropped_examples(self) -> int:
        """Number of examples that are not in the rows."""
        return self.unanswered + self.cut_away + self.weightless

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
        lines = [
            f"{counted(self.examples, 'example')} of {counted(self.tokens, 'token')} in {counted(self.rows, 'row')} of"
            f" {self.length:,}: {_share(self.loss_tokens, self.tokens, 'token')} in the loss"
        ]
        if self.divided:
            verb = "is" if self.divided == 1 else "are"
            lines.append(
                f"{counted(self.divided, 'conversation')} {verb} {self.parts:,} of these examples, since the chat"
                " template rewrites earlier answers"
            )
        if self.cut_examples:
            lines.append(
                f"{_share(self.cut_examples, self.examples, 'example')} longer than a row:"
                f" {_share(self.cut_tokens, self.tokens, 'token')} cut off at their end, {self.cut_loss_tokens:,} of"
                " them in the loss"
            )
        if self.dropped_examples:
            dropped = _share(self.dropped_tokens, self.tokens, "token").rpartition(" ")[0]
            lines.append(
                f"{_share(self.dropped_examples, self.examples, 'example')} dropped, with {dropped}:"
                f" {reasons(vars(self))}"
            )
        return lines


def reasons(counts: Mapping[str, int]) -> str:
    """Return why examples are dropped, by the names of the fields of `RowSummary`."""
    found = {
        "without a token in the loss": counts["unanswered"],
        "whose answer starts after the end of a row": counts["cut_away"],
        "of weight 0": counts["weightless"],
    }
    return ", ".join(f"{number:,} {reason}" for reason, number in found.items() if number)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it is not 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _share(number: int, total: int, noun: str) -> str:
    share = f" ({number / total:.1%})" if total else ""
    return f"{counted(number, noun)}{share} {'is' if number == 1 else 'are'}"
