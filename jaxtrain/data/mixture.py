"""Mixtures of sources in exact proportions, whose order is a function of the number of a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.permutation import Permutation
from jaxtrain.data.sources import Example, Source
from jaxtrain.errors import UserError

_MAX_PERIOD = 100_000

Weight = int | float | str | Fraction


class Places(NamedTuple):
    """Where rows of a mixture are.

    Attributes:
      sources: The number of each row's source, int64 [N].
      examples: The number of its example there, int64 [N].
    """

    sources: NDArray[np.int64]
    examples: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Rows of several sources in exact proportions, endless and shuffled, in an order that depends on the seed only.

    After any number n of rows, the number of rows from each source differs from weight · n by less than 1. Every source
    has its own epochs, each a new permutation in which every example occurs once. The example of row n is computed from
    n, so that a position is one number, nothing is shared between processes, and each reads its own rows only.

    `training_batches` reads a mixture in this order. As a source, a mixture is its rows without shuffling, until the
    first source is exhausted.

    Args:
      sources: Sources of examples with equal names and shapes.
      weights: Proportions of the rows, one for each source, such as (0.7, 0.3) or (7, 3); None for equal ones.

    Raises:
      UserError: There is no source, one is empty, a weight is not positive, or the proportions have too many digits.

    References:
      Tijdeman, The chairman assignment problem (1980).

    Example:
      >>> mixture = Mixture([[{"x": 1}] * 8, [{"x": 2}] * 8], weights=[3, 1])
      >>> [mixture[i]["x"] for i in range(8)]
      [1, 1, 2, 1, 1, 1, 2, 1]
      >>> mixture.places(np.arange(10**12, 10**12 + 2), seed=0)
      Places(sources=array([0, 0]), examples=array([5, 1]))
    """

    sources: Sequence[Source]
    weights: Sequence[Weight] | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("the mixture has no sources: give at least one")
        for i, source in enumerate(self.sources):
            if not len(source):
                raise UserError(f"source {i} of the mixture has no examples: give it some or leave it out")
        if self.weights is not None and len(self.weights) != len(self.sources):
            raise UserError(
                f"the mixture has {len(self.sources)} sources but {len(self.weights)} weights: give one for each"
            )
        self.counts  # noqa: B018, checks the weights

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each source in a period, after which the order of the sources repeats."""
        counts = integer_ratio(self.weights or [1] * len(self.sources))
        if sum(counts) > _MAX_PERIOD:
            raise UserError(
                f"the weights {', '.join(map(str, self.weights or ()))} repeat after {sum(counts):,} rows, more than"
                f" {_MAX_PERIOD:,}: use fewer digits"
            )
        return counts

    def places(self, rows: NDArray[np.int64], seed: int | None) -> Places:
        """Return where rows of the endless order are.

        Args:
          rows: Row numbers, at least 0, int [N].
          seed: Seed of the permutations, at least 0; None for the order of each source.
        """
        rows = np.asarray(rows, np.int64)
        period, ranks = self._period
        rounds, phase = np.divmod(rows, len(period))
        sources = period[phase]
        numbers = rounds * np.asarray(self.counts)[sources] + ranks[phase]
        epochs, examples = np.divmod(numbers, np.array([len(source) for source in self.sources])[sources])
        if seed is not None:
            # The rows of a batch are of one or two epochs of each source.
            for source, epoch in {*zip(sources.tolist(), epochs.tolist(), strict=True)}:
                own = (sources == source) & (epochs == epoch)
                permutation = Permutation(len(self.sources[source]), (seed, source, epoch))
                examples[own] = permutation(examples[own])
        return Places(sources, examples)

    def __len__(self) -> int:
        period, _ = self._period
        ends = []
        for source, (examples, count) in enumerate(zip(map(len, self.sources), self.counts, strict=True)):
            own = np.flatnonzero(period == source)
            ends.append(examples // count * len(period) + int(own[examples % count]))
        return min(ends)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        (source,), (example,) = self.places(np.array([index]), seed=None)
        return self.sources[source][int(example)]

    @cached_property
    def _period(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each row of a period, and how many rows before it are of the same source."""
        period = np.array(assignment(self.counts), np.int64)
        ranks = np.empty_like(period)
        for source, count in enumerate(self.counts):
            ranks[period == source] = np.arange(count)
        return period, ranks


def integer_ratio(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of some weights; a float is the decimal number that it shows.

    Args:
      weights: Positive numbers, or texts of them.

    Raises:
      UserError: A weight is not a positive number.

    Example:
      >>> integer_ratio([0.7, "0.2", 0.1])
      (7, 2, 1)
    """
    fractions = [_positive(weight) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * scale) for fraction in fractions]
    return tuple(count // gcd(*counts) for count in counts)


def assignment(counts: Sequence[int]) -> list[int]:
    """Order the rows of a period, so that after n rows source i has had n · counts[i] / sum(counts) ± less than 1.

    This is Tijdeman's algorithm: of the sources that are due, the next row is of the one whose deadline is first. The
    deviation is at most 1 - 1 / (2 · sources - 2).

    Args:
      counts: Number of rows of each source in the period.

    Returns:
      The source of each row.

    Example:
      >>> assignment([3, 1])
      [0, 0, 1, 0]
    """
    total, due = sum(counts), 2 * len(counts) - 2
    if not due:
        return [0] * total
    shares, deficits, order = np.array(counts, np.int64), np.zeros(len(counts), np.int64), []
    for _ in range(total):
        deficits += shares  # n · share - total · rows so far
        slack = np.where(due * deficits >= total, (due * (total - deficits) - total) / shares, np.inf)
        source = int(slack.argmin())
        deficits[source] -= total
        order.append(source)
    return order


def _positive(weight: Weight) -> Fraction:
    try:
        fraction = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if fraction <= 0:
        raise UserError(f"the weight {weight} of a mixture is not a positive number: use one such as 0.7")
    return fraction
