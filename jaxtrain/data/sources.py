"""Sources: the protocol, a length and examples by number, and sources derived from others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.holdout import random_split

Example = dict[str, Any]  # name -> numpy array or numpy scalar, without a batch axis
Batch = dict[str, NDArray[Any]]  # name -> [batch_size, ...]
Rows = Sequence[int] | NDArray[np.intp]  # row numbers in a batch
Collate = Callable[[list[Any]], Mapping[str, Any] | Sequence[Any]]  # the examples of a batch -> its arrays


class Source(Protocol):
    """Anything with a length whose items are examples of equal shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, eq=False)
class Subset:
    """Subset of a source, as `torch.utils.data.Subset`: item `i` is `source[indices[i]]`.

    Args:
      source: Source of examples.
      indices: int [N].

    Example:
      >>> from jaxtrain.data import Arrays
      >>> source = Arrays(np.zeros((3, 1), np.float32), np.arange(3, dtype=np.int32))
      >>> [int(example["label"]) for example in Subset(source, np.array([2, 0]))]
      [2, 0]
    """

    source: Source
    indices: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.source[int(self.indices[index])]


@dataclass(frozen=True, eq=False)
class MappedSource:
    """Source that applies a function on access: item `i` is `function(source[i])`.

    Args:
      source: Source of examples.
      function: Function of an example.

    Example:
      >>> from jaxtrain.data import Arrays
      >>> source = Arrays(np.zeros((3, 1), np.float32), np.arange(3, dtype=np.int32))
      >>> MappedSource(source, lambda example: {"twice": 2 * example["label"]})[2]
      {'twice': np.int32(4)}
    """

    source: Source
    function: Callable[[Example], Any]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.function(self.source[index])


@dataclass(frozen=True, eq=False)
class IndexedSource:
    """Source that adds the index of every example, int32: item `i` is `{**source[i], "index": i}`.

    Args:
      source: Source of examples.

    Example:
      >>> IndexedSource([{"label": 7}, {"label": 8}])[1]
      {'label': 8, 'index': np.int32(1)}
    """

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Example:
        return {**self.source[index], "index": np.int32(index)}


def subsample(source: Source, count: int) -> Source:
    """Draw a fixed random subset of a source, in its order.

    Args:
      source: Source of examples.
      count: Number of examples to keep at most.

    Returns:
      The subset, or `source` itself if it has no more than `count` examples.

    Example:
      >>> len(subsample([{"label": i} for i in range(9)], 4))
      4
    """
    if len(source) <= count:
        return source
    return Subset(source, np.sort(np.random.RandomState(0).permutation(len(source))[:count]))


def split_source(source: Source, validation_fraction: float = 0.1) -> tuple[Subset, Subset]:
    """Split a source at random into (train, validation); the indices depend on its length only.

    Args:
      source: Source of examples.
      validation_fraction: Fraction that is held out.

    Raises:
      UserError: The fraction is not in (0, 1), or there are fewer than two examples.
    """
    train, validation = random_split(len(source), validation_fraction)
    return Subset(source, train), Subset(source, validation)
