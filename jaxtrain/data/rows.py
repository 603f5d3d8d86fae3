"""Sources made from other sources: some of their examples, or each of them changed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.holdout import random_split
from jaxtrain.data.source import Example, Source


@dataclass(frozen=True, eq=False)
class Subset:
    """Some examples of a source: item `i` is `source[indices[i]]`.

    >>> from jaxtrain.data import Arrays
    >>> source = Arrays(np.zeros((3, 1), np.float32), np.arange(3, dtype=np.int32))
    >>> [int(example["label"]) for example in Subset(source, np.array([2, 0]))]
    [2, 0]
    """

    source: Source
    indices: NDArray[np.intp]  # [N]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return self.source[int(self.indices[index])]


@dataclass(frozen=True, eq=False)
class MappedSource:
    """A source with a function of each example, computed when asked for: item `i` is `function(source[i])`.

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
    """A source whose examples know their number, int32: item `i` is `{**source[i], "index": i}`.

    >>> IndexedSource([{"label": 7}, {"label": 8}])[1]
    {'label': 8, 'index': np.int32(1)}
    """

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Example:
        return {**self.source[index], "index": np.int32(index)}


def subsample(source: Source, count: int) -> Source:
    """`count` examples of `source` in its order, always the same: all of them where it has no more.

    >>> len(subsample([{"label": i} for i in range(9)], 4))
    4
    """
    if len(source) <= count:
        return source
    return Subset(source, np.sort(np.random.RandomState(0).permutation(len(source))[:count]))


def split_source(source: Source, validation_fraction: float = 0.1) -> tuple[Subset, Subset]:
    """The examples of `source` as (train, validation), drawn by index: the same for every source of that length.

    Raises UserError if the fraction is not between 0 and 1 or there are fewer than two examples.
    """
    train, validation = random_split(len(source), validation_fraction)
    return Subset(source, train), Subset(source, validation)
