"""How the shardings of an array follow it through changes of its layout."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

Entries = tuple[Any, ...]
"""The mesh axes of each axis of an array, as in a `PartitionSpec`; None for those that are not divided."""


def entries(spec: P, ndim: int) -> Entries:
    """Return the mesh axes of every axis of an array.

    Example:
      >>> entries(P("fsdp"), 2)
      ('fsdp', None)
    """
    return (*spec, *[None] * (ndim - len(spec)))


def reshaped(spec: Entries, before: Sequence[int], after: Sequence[int], mesh: Mesh | AbstractMesh) -> Entries | None:
    """Return the mesh axes of a reshaped array whose parts stay on their devices; None if there are none.

    Args:
      spec: Those of the array.
      before: Its shape.
      after: Its new shape.
      mesh: The mesh.

    Example:
      >>> import jax
      >>> mesh = Mesh(jax.devices()[:1], "tensor")
      >>> reshaped((None, "tensor", None), (3, 4, 8), (3, 32), mesh)
      (None, 'tensor')
      >>> reshaped((None, None, "tensor"), (3, 4, 8), (3, 32), mesh) is None
      True
    """
    found: list[Any] = [None] * len(after)
    if 0 in before:
        return None
    for own, new in _groups(before, after):
        divided = [i for i in own if spec[i] is not None]
        if not divided:
            continue
        # The slowest axis of a group only: other parts would not be contiguous.
        first = next((i for i in own if before[i] > 1), None)
        to = next((i for i in new if after[i] > 1), None)
        if divided != [first] or to is None or after[to] % _parts(spec[divided[0]], mesh):
            return None
        found[to] = spec[divided[0]]
    return tuple(found)


def _parts(axes: Any, mesh: Mesh | AbstractMesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return int(np.prod([mesh.shape[name] for name in names]))


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of successive axes of equal sizes before and after a reshape."""
    i = j = 0
    while i < len(before) or j < len(after):
        own, new = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(own), j + len(new)
        while (n := _size(before, own)) != (m := _size(after, new)):
            if n < m:
                own.append(i)
                i += 1
            else:
                new.append(j)
                j += 1
        yield own, new


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return int(np.prod([shape[i] for i in axes]))
