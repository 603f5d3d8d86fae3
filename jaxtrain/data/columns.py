"""A mapping of arrays as a source."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtrain.data.conversion import as_array
from jaxtrain.data.sources import Batch, Example
from jaxtrain.errors import UserError

_DIGESTED_BYTES = 2**26  # of an array; of larger ones rows at equal distances


class Columns:
    """Examples in memory as arrays of equal length: item `i` is `{name: array[i]}`.

    Args:
      arrays: Name to array of NumPy, JAX or PyTorch, or list of numbers, [N, ...].

    Raises:
      UserError: There is none, the lengths differ, or a value is not an array.

    Example:
      >>> columns = Columns({"x": np.zeros((3, 2), np.float32), "y": [1, 2, 3]})
      >>> len(columns), columns[2]["y"]
      (3, np.int32(3))
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        if not arrays:
            raise UserError("the data is an empty mapping: give it an array for each name")
        self.arrays: dict[str, NDArray[Any]] = {
            name: as_array(value, name, "the data") for name, value in arrays.items()
        }
        first, *others = self.arrays
        for name, array in self.arrays.items():
            if not array.ndim:
                raise UserError(f"{name!r} of the data is a single number: give it one value per example")
        for name in others:
            if len(self.arrays[name]) != len(self.arrays[first]):
                raise UserError(
                    f"{first!r} has {len(self.arrays[first])} examples but {name!r} {len(self.arrays[name])}: give all"
                    " arrays of the data the same length"
                )
        self._length = len(self.arrays[first])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Example:
        return {name: array[index] for name, array in self.arrays.items()}

    def digest(self) -> str:
        """Return a digest of the arrays; of a large one, of rows at equal distances."""
        found = hashlib.sha256()
        for name, array in self.arrays.items():
            step = max(1, -(-array.nbytes // _DIGESTED_BYTES))
            found.update(repr((name, array.dtype.name, array.shape)).encode())
            found.update(np.ascontiguousarray(array[::step]).tobytes())
        return found.hexdigest()

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return copies of the given rows, as one batch."""
        rows = np.asarray(numbers, np.intp)
        return {name: array[rows] for name, array in self.arrays.items()}
