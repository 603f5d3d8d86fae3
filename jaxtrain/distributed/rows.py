"""Place batches on a mesh, with the rows of every micro-batch sharded over the devices.

Micro-batches contain the same rows as on one device: a window is [k, B/k, …] with its second axis sharded. So every
device has its share of every micro-batch and no row moves between devices.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtrain.distributed.mesh import ROWS, data_parallel_size
from jaxtrain.errors import UserError
from jaxtrain.step import require_32_bits, require_equal_rows, split_batch


def window_sharding(mesh: Mesh, accumulate: int) -> NamedSharding:
    """Return the sharding of a window [k, B/k, …]; for `accumulate` 1, of a batch [B, …]."""
    rows = tuple(axis for axis in ROWS if axis in mesh.shape)
    return NamedSharding(mesh, P(rows) if accumulate == 1 else P(None, rows))


def place_batch(batch: Any, mesh: Mesh, accumulate: int = 1) -> Any:
    """Place a batch [B, …] on the mesh as a window of micro-batches [k, B/k, …].

    Args:
      batch: Pytree of arrays. NumPy arrays contain the rows of this process (`local_rows`), JAX arrays all rows. A
        scalar is replicated on every device.
      mesh: The mesh.
      accumulate: The number k of micro-batches; for 1 the result is a batch [B, …].

    Returns:
      The batch as global arrays.

    Raises:
      UserError: The rows of a micro-batch are not divisible by the devices that they are sharded over, arrays have
        different numbers of rows, or an integer is beyond 32 bits.
    """
    sharding = window_sharding(mesh, accumulate)
    require_32_bits(batch)
    for kind in (jax.Array, np.ndarray):  # all rows, and those of this process
        require_equal_rows(jax.tree.map(lambda x, kind=kind: x if isinstance(x, kind) else None, batch))

    def leaf(x: Any) -> jax.Array:
        if np.ndim(x) == 0 and accumulate == 1:
            return jax.device_put(x, NamedSharding(mesh, P()))
        window = split_batch(x, accumulate)
        rows = window.shape[len(sharding.spec) - 1]
        if isinstance(x, jax.Array):
            _check(rows, mesh)
            return jax.device_put(window, sharding)
        _check(rows * data_parallel_size(mesh.shape) // local_data_parallel_size(mesh), mesh)
        return jax.make_array_from_process_local_data(sharding, window)

    return jax.tree.map(leaf, batch)


def place_whole_batch(batch: Any, mesh: Mesh) -> Any:
    """Place a batch [B, …] that every process has whole on the mesh; shard its rows if they are divisible."""
    rows, whole = window_sharding(mesh, 1), NamedSharding(mesh, P())
    require_32_bits(batch)

    def leaf(x: Any) -> jax.Array:
        x = np.asarray(x)
        sharding = rows if x.ndim and x.shape[0] % data_parallel_size(mesh.shape) == 0 else whole
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(leaf, batch)


def local_rows(mesh: Mesh, batch_size: int, accumulate: int = 1) -> NDArray[np.int64]:
    """Return the rows of a batch [B, …] that this process supplies, in the order that `place_batch` expects.

    Args:
      mesh: The mesh.
      batch_size: The number B of rows of the global batch.
      accumulate: The number of micro-batches.

    Returns:
      Row indices, int64[B/p] for p processes with different rows.

    Raises:
      UserError: The rows of a micro-batch are not divisible by the devices that they are sharded over.

    Example:
      >>> from jaxtrain.distributed.mesh import make_mesh
      >>> local_rows(make_mesh("data=1", jax.devices()[:1]), batch_size=8, accumulate=2).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _check(batch_size // accumulate, mesh)
    window = split_batch(np.arange(batch_size), accumulate)
    shards = window_sharding(mesh, accumulate).addressable_devices_indices_map(window.shape).values()
    columns = {(index[-1].start, index[-1].stop): window[index] for index in shards if index is not None}
    return np.concatenate([columns[place] for place in sorted(columns, key=lambda p: p[0] or 0)], axis=-1).reshape(-1)


def local_data_parallel_size(mesh: Mesh) -> int:
    """Return how many shards of rows this process has; devices along the other axes have the same rows.

    >>> from jaxtrain.distributed.mesh import make_mesh
    >>> local_data_parallel_size(make_mesh("tensor=1", jax.devices()[:1]))
    1
    """
    own = np.vectorize(lambda device: device.process_index == jax.process_index())(mesh.devices)
    others = tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in ROWS)
    return int(own.any(others).sum())


def _check(rows: int, mesh: Mesh) -> None:
    n = data_parallel_size(mesh.shape)
    if rows % n:
        axes = [axis for axis in ROWS if mesh.shape.get(axis, 1) > 1]
        raise UserError(
            f"a micro-batch of {rows} rows is not divisible by the {n} devices of {' × '.join(axes)}: "
            f"use a multiple of {n}, or another mesh"
        )
