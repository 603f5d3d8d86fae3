"""Written dates with their ISO 8601 form: a small translation task that needs no download."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.holdout import random_split
from jaxtrain.data.sources import Example

# POSIX's century of two-digit years: 69 is 1969, 68 is 2068.
FIRST, LAST = date(1969, 1, 1), date(2068, 12, 31)

_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")

FORMATS: tuple[Callable[[date], str], ...] = (
    lambda d: f"{_WEEKDAYS[d.weekday()]}, {d.day} {_month(d)} {d.year}",
    lambda d: f"{_WEEKDAYS[d.weekday()][:3]} {_month(d)[:3]} {d.day} {d.year}",
    lambda d: f"{_month(d)} {d.day}, {d.year}",
    lambda d: f"the {_ordinal(d.day)} of {_month(d)} {d.year}",
    lambda d: f"{_month(d).upper()} {d.year}, {_ordinal(d.day)}",
    lambda d: f"{d.day}. {_ROMAN[d.month - 1]}. {d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year % 100:02}",
    lambda d: f"{d.month}/{d.day}/{d.year % 100:02}",
    lambda d: f"{_month(d)[:3].lower()} {d.day} '{d.year % 100:02}",
    lambda d: f"{d.day:02}{_month(d)[:3].upper()}{d.year}",
)
"""Formats of a date."""


@dataclass(frozen=True, eq=False)
class Dates:
    """Every day in every format: item `i` is `{"source": date in words, "target": ISO 8601}`, both text.

    Args:
      days: Proleptic Gregorian ordinals [N].

    Example:
      >>> Dates(np.array([date(2026, 11, 21).toordinal()]))[0]
      {'source': 'Saturday, 21 November 2026', 'target': '2026-11-21'}
    """

    days: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.days) * len(FORMATS)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"date {index} of {len(self)}")
        day = date.fromordinal(int(self.days[index // len(FORMATS)]))
        return {"source": FORMATS[index % len(FORMATS)](day), "target": day.isoformat()}


def dates(validation_fraction: float = 0.1) -> tuple[Dates, Dates]:
    """Return the days from 1969 to 2068 as (train, validation); a day is held out in all formats.

    Example:
      >>> [len(part) for part in dates()]
      [328730, 36520]
    """
    days = np.arange(FIRST.toordinal(), LAST.toordinal() + 1)
    train, validation = random_split(len(days), validation_fraction)
    return Dates(days[train]), Dates(days[validation])


def _month(day: date) -> str:
    return _MONTHS[day.month - 1]


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
