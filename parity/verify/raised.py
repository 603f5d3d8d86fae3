"""Exceptions that the code of a port raises."""

import traceback
from typing import NamedTuple

from parity.sides.jax_lines import is_of_user
from parity.source import source_line


class Raised(NamedTuple):
    """An exception: its kind with the first line of its message, and the line of the user's file that raised it."""

    what: str
    line: str


def raised_by_user(error: Exception) -> Raised | None:
    """Return what the code of a user raised, below the function that caught it; None if no line of it took part.

    >>> raised_by_user(ValueError("three rows")) is None
    True
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_of_user(frame.filename) and "-packages/" not in frame.filename
    ]
    if not frames:
        return None
    first = str(error).strip().partition("\n")[0]
    line = source_line(frames[-1].filename, frames[-1].lineno or 0)
    return Raised(f"{type(error).__name__}: {first}", line)
