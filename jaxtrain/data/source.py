"""The protocol of sources: a length, and examples `source[i]` as dicts of numpy arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Example = dict[str, Any]  # name -> numpy array or numpy scalar, without a batch axis
Batch = dict[str, NDArray[Any]]  # name -> [batch_size, ...]
Rows = Sequence[int] | NDArray[np.intp]  # row numbers in a batch
Collate = Callable[[list[Any]], Mapping[str, Any] | Sequence[Any]]  # the examples of a batch -> its arrays


class Source(Protocol):
    """Anything with a length whose items are examples of equal shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...
