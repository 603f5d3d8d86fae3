"""Selections that no batch decides both ways: `where`, `clip` and the like, whose condition depends on no parameter.

Which elements of a constant or of a batch take which side is decided while tracing, in NumPy, or when PyTorch's model
is built. A side that no element takes is not exercised: swapping the ends of a band of frequencies cannot be seen where
no frequency is in the band. A condition that depends on the parameters is left out: training may change it.
"""

from collections.abc import Iterator
from types import FrameType

import numpy as np

from parity.source import source_line

Site = tuple[str, str, int]
"""What is decided, and the file and line of the call."""


class Selections:
    """The sides that selections took.

    >>> selections = Selections()
    >>> selections.add("condition of where", "my_model.py", 7, np.array([True, True]))
    >>> selections.add("condition of where", "my_model.py", 9, np.array([True, False]))
    >>> [*selections.lines()]
    ['condition of where is True throughout: my_model.py:7']
    """

    def __init__(self) -> None:
        self._sides: dict[Site, set[bool]] = {}

    def add(self, what: str, file: str, line: int, condition: np.ndarray) -> None:
        """Record a call.

        Args:
          what: What the condition is.
          file: File of the call.
          line: Line of the call.
          condition: Its values.
        """
        sides = self._sides.setdefault((what, file, line), set())
        sides.update(value for value, taken in ((True, condition.any()), (False, not condition.all())) if taken)

    @property
    def one_sided(self) -> bool:
        """Whether a selection took one side only."""
        return any(len(sides) == 1 for sides in self._sides.values())

    def lines(self) -> Iterator[str]:
        """Yield a line for each selection that took one side only."""
        for (what, file, line), sides in self._sides.items():
            if len(sides) == 1:
                yield f"{what} is {next(iter(sides))} throughout: {source_line(file, line)}"


def caller(frame: FrameType | None, skipped: tuple[str, ...]) -> tuple[str, int] | None:
    """Return file and line of the innermost frame outside of the files and folders `skipped`."""
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
