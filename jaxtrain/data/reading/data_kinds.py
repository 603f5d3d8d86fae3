"""The kinds of data: sources, streams and DataLoaders."""

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from jaxtrain.data.columns import Columns
from jaxtrain.data.reading.torch_loader import is_torch
from jaxtrain.errors import UserError

_VALUES = (list, tuple, str, bytes, Mapping)  # what `Columns` takes or refuses


class Kind(Enum):
    """How data is read: by number, one after the other, or in the batches of a DataLoader."""

    SOURCE = "source"
    STREAM = "stream"
    LOADER = "loader"


def kind_of(data: Any) -> tuple[Kind, Any]:
    """Return how data is read, with the data to read; a mapping of arrays becomes a source.

    Args:
      data: What the user provided.

    Returns:
      A tuple (kind, data).

    Raises:
      UserError: It is of no kind, or a mapping of something else.

    Example:
      >>> [kind_of(data)[0].value for data in ({"x": [1, 2]}, [{"x": 1}], iter([{"x": 1}]))]
      ['source', 'source', 'stream']
    """
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a pandas DataFrame
        data = {name: data[name] for name in data.columns}
    if isinstance(data, Mapping):
        for name, value in data.items():
            if _is_source(value) and not (isinstance(value, _VALUES) or hasattr(value, "__array__")):
                raise UserError(f"the data is a mapping of datasets: give one of them, such as data[{name!r}]")
        return Kind.SOURCE, Columns(data)
    if isinstance(data, tuple) and data and all(getattr(part, "ndim", 0) for part in data):
        raise UserError(f"the data is a tuple of {len(data)} arrays: name them, as in {{'x': images, 'y': labels}}")
    if is_torch(data, "DataLoader"):
        return Kind.LOADER, data
    if isinstance(data, type):
        raise UserError(f"the data is the class {data.__name__}: give an instance of it")
    if not isinstance(data, str | bytes | os.PathLike):
        if _is_source(data):
            return Kind.SOURCE, data
        if isinstance(data, Iterable) or callable(data):
            return Kind.STREAM, data
    raise UserError(
        f"the data is of type {type(data).__name__}: give a mapping of arrays, a dataset with a length and examples by"
        " number, an iterable of examples or a function that returns one, or a DataLoader"
    )


def digest_of(data: Any) -> str | None:
    """Return a digest of data in memory, a mapping of arrays or a DataFrame; None for data of other kinds.

    Example:
      >>> digest_of({"x": [1, 2]}) == digest_of({"x": [1, 3]}), digest_of([{"x": 1}])
      (False, None)
    """
    source = None if data is None else kind_of(data)[1]
    return source.digest() if isinstance(source, Columns) else None


def _is_source(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_torch(data, "IterableDataset")
