"""The shapes of the batches that the models of a folder are for: `shapes.json`.

A size is a number, or a letter that stands for one number of a range wherever it occurs in a shape.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHAPES = "shapes.json"
"""File of the shapes of batches for each model of a folder."""

Sizes = tuple[int | str, ...]


class Shapes(NamedTuple):
    """Shapes of batches.

    Attributes:
      sizes: Sizes of each array, by name.
      ranges: The smallest and the largest number that a letter stands for.
    """

    sizes: Mapping[str, Sizes]
    ranges: Mapping[str, tuple[int, int]] = {}

    def has(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a batch, which may have other arrays as well, has these shapes."""
        found: dict[int | str, int] = {}
        for name, sizes in self.sizes.items():
            if name not in batch or len(given := np.shape(batch[name])) != len(sizes):
                return False
            for size, number in zip(sizes, given, strict=True):
                low, high = self.ranges.get(size, (size, size)) if isinstance(size, str) else (size, size)
                if not low <= number <= high or found.setdefault(size, number) != number:
                    return False
        return True

    def __str__(self) -> str:
        text = ", ".join(f"{name} [{', '.join(map(str, sizes))}]" for name, sizes in sorted(self.sizes.items()))
        ranges = [f"{letter} from {low} to {high}" for letter, (low, high) in self.ranges.items()]
        return f"{text} ({', '.join(ranges)})" if ranges else text


def shapes(batch: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a batch.

    Args:
      batch: Arrays by name.

    Example:
      >>> str(shapes({"x": np.ones((2, 3)), "y": np.ones(2)}))
      'x [2, 3], y [2]'
    """
    return Shapes({name: tuple(map(int, np.shape(x))) for name, x in batch.items()})


def save_shapes(folder: Path, files: Mapping[str, Sequence[Shapes]]) -> None:
    """Write the shapes of each file of a folder."""
    written = {
        file: [{"sizes": its.sizes, **({"ranges": its.ranges} if its.ranges else {})} for its in known]
        for file, known in files.items()
    }
    (folder / SHAPES).write_text(json.dumps(written, indent=1), encoding="utf-8")


def load_shapes(folder: Path) -> list[tuple[Shapes, str]]:
    """Return the shapes of a folder, each with its file."""
    files = json.loads((folder / SHAPES).read_text(encoding="utf-8"))
    return [
        (
            Shapes(
                {name: tuple(sizes) for name, sizes in its["sizes"].items()},
                {letter: (low, high) for letter, (low, high) in its.get("ranges", {}).items()},
            ),
            file,
        )
        for file, known in files.items()
        for its in known
    ]
