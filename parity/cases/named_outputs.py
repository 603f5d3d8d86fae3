"""The tensors of a module's result by name, in both frameworks."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def named_outputs(outputs: Any) -> dict[str, Any]:
    """Return the tensors or arrays in a result by their keys and places; a single one has the name "".

    Dataclasses are taken as dicts of their fields, and containers that are registered with PyTorch's trees as tuples.

    Example:
      >>> import numpy as np
      >>> [*named_outputs({"loss": np.ones(()), "layers": (np.ones(2), None, np.ones(3)), "k": 3})]
      ['loss', 'layers/0', 'layers/2']
    """
    return dict(_named(outputs, ""))


def _named(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield path, value
        return
    for key, part in _parts(value):
        yield from _named(part, f"{path}/{key}".removeprefix("/"))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif not (value is None or isinstance(value, bool | int | float | complex | str)):
        from jaxtrain.torch_internals import pytree

        if node := pytree.SUPPORTED_NODES.get(type(value)):
            yield from enumerate(node.flatten_fn(value)[0])
