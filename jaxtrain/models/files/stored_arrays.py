"""Place arrays that are stored in files on the devices, reading only what each device gets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]


def read_arrays(stored: Any, like: Any) -> Any:
    """Read stored arrays into their shards, one by one.

    Args:
      stored: Pytree of arrays in files: with a shape and a dtype, read by slices of every axis.
      like: The same tree with the shapes, dtypes and shardings of the results, and with None for arrays that are not
        read. Without a sharding an array is placed on the default device.

    Returns:
      The arrays, with None for None. Each process reads what its devices hold.

    Example:
      >>> stored = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(2)}
      >>> read_arrays(stored, {"a": jax.ShapeDtypeStruct((2, 3), "float32"), "b": None})["a"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """

    def read(like: Any, array: Any) -> jax.Array | None:
        if like is None:
            return None
        return read_parts(lambda index: array[index].astype(like.dtype, copy=False), like)

    return jax.tree.map(read, like, stored, is_leaf=lambda x: x is None)


def read_parts(read: Callable[[Index], np.ndarray], like: Any) -> jax.Array:
    """Return the array of which `read(index)` returns any part, read one shard at a time."""
    whole = tuple(slice(0, size) for size in like.shape)
    if like.sharding is None:
        return jnp.asarray(read(whole))
    shards: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        bounds = tuple(part.indices(size) for part, size in zip(index, like.shape, strict=True))
        shards.setdefault(bounds, []).append(device)
    # `jax.make_array_from_callback` would hold all shards in the host's memory at once.
    placed = []
    for bounds, devices in shards.items():
        part = read(tuple(slice(*x) for x in bounds))
        placed += [jax.device_put(part, device) for device in devices]
        jax.block_until_ready(placed[-len(devices) :])
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)
