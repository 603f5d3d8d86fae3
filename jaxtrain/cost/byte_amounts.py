"""Parse and format amounts of bytes and bandwidths."""

import re

from jaxtrain.errors import UserError

_UNITS = {f"{letter}{binary}B": (1024 if binary else 1000) ** (i + 1)
          for binary in ("i", "") for i, letter in enumerate("KMGT")}  # fmt: skip


def parse_bytes(amount: str) -> int:
    """Return the number of bytes of an amount with a unit, such as 16GiB.

    Raises:
      UserError: `amount` is not a positive number with a unit from KB to TiB.

    Example:
      >>> parse_bytes("1.5GiB"), parse_bytes("40 GB")
      (1610612736, 40000000000)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B)", amount.strip(), re.ASCII)
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2]])):
        raise UserError(f"{amount[:50]!r} is not an amount of memory: write it with its unit, as in 16GiB or 40GB")
    return size


def parse_bandwidth(rate: str) -> float:
    """Return the bytes per second of a rate with a unit, such as 50GB/s or 400Gbit/s.

    Raises:
      UserError: `rate` is not a positive number with a unit.

    Example:
      >>> parse_bandwidth("50GB/s"), parse_bandwidth("400 Gbit/s")
      (50000000000.0, 50000000000.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(?:([KMGT]i?B)|([KMGT])bit)/s", rate.strip(), re.ASCII)
    if found is None or not (number := float(found[1])):
        raise UserError(f"{rate[:50]!r} is not a bandwidth: write it with its unit, as in 50GB/s or 400Gbit/s")
    return number * (_UNITS[found[2]] if found[2] else _UNITS[f"{found[3]}B"] / 8)


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit and about three digits.

    >>> format_bytes(1610612736), format_bytes(250 * 2**20)
    ('1.50 GiB', '250 MiB')
    """
    if size < 2**10:
        return f"{size:.0f} B"
    unit = next(u for u in ("TiB", "GiB", "MiB", "KiB") if size >= _UNITS[u])
    amount = size / _UNITS[unit]
    return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
