"""The mesh: a grid of devices with the axes dcn, pipeline, data, fsdp, expert, sequence and tensor.

`data` shards the rows of a batch. `dcn` shards rows over nodes or pods that a slow network joins: gradients are added
within a node first. `pipeline` shards layers, through which the micro-batches of a window pass (Narayanan et al. 2021).
`fsdp` shards rows, and also parameters, gradients and optimizer state (ZeRO stage 3, Rajbhandari et al. 2020). `expert`
shards rows, and the experts of sparse mixtures, to which tokens are sent (Lepikhin et al. 2020).
`sequence` shards the tokens of a row, as in context parallelism (Llama 3, Grattafiori et al. 2024, section 3.3.2).
`tensor` shards the matrices of a layer (Shoeybi et al. 2019).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtrain.distributed.device_order import DCN, ordered_devices
from jaxtrain.errors import UserError
from jaxtrain.fields import brief

PIPELINE, DATA, FSDP, EXPERT, SEQUENCE, TENSOR = "pipeline", "data", "fsdp", "expert", "sequence", "tensor"
AXES = (DCN, PIPELINE, DATA, FSDP, EXPERT, SEQUENCE, TENSOR)
ROWS = (DCN, DATA, FSDP, EXPERT)
"""The axes that shard the rows of a batch."""
ROWS_OF_HEAD = (*ROWS, PIPELINE)
"""The axes that shard the rows of what follows the layers of a pipeline: the last stage's rows, over all stages."""


def parse_mesh(spec: str) -> dict[str, int]:
    """Return the size of every axis of a mesh given as "data=2,fsdp=4"; omitted axes have size 1.

    Raises:
      UserError: An axis is unknown, given twice or without a positive size.

    Example:
      >>> sizes = parse_mesh("data=2,fsdp=4")
      >>> sizes["fsdp"], sizes["tensor"]
      (4, 1)
    """
    given: dict[str, int] = {}
    for part in spec.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UserError(f"mesh {brief(spec)} has an axis {brief(axis)}: use {', '.join(AXES)}, as in data=2,fsdp=4")
        if axis in given:
            raise UserError(f"mesh {brief(spec)} gives {axis} twice: give it once")
        if not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise UserError(
                f"mesh {brief(spec)} gives {axis} the size {brief(size)}: it must be a number of devices, 1 or more"
            )
        given[axis] = int(size)
    return {axis: given.get(axis, 1) for axis in AXES}


def make_mesh(spec: str | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Create a mesh of devices with the axes dcn, pipeline, data, fsdp, expert, sequence and tensor.

    Neighbors along the last axes, which communicate most, are neighbors in hardware. The groups of `dcn` are
    whole nodes.

    Args:
      spec: Sizes of the axes, as "data=2,fsdp=4"; by default all devices are on `data`.
      devices: The devices, by default `jax.devices()`.

    Returns:
      The mesh, with axes of type `AxisType.Auto`.

    Raises:
      UserError: The sizes do not multiply to the number of devices, or `dcn` divides a node.

    Example:
      >>> make_mesh("data=1", jax.devices()[:1]).shape["data"]
      1
    """
    devices = jax.devices() if devices is None else devices
    shape = parse_mesh(f"{DATA}={len(devices)}" if spec is None else spec)
    product = math.prod(shape.values())
    if product != len(devices):
        raise UserError(
            f"mesh {brief(spec)} has {product} devices, got {len(devices)}: make its sizes multiply to {len(devices)}"
        )
    types = (AxisType.Auto,) * len(AXES)
    return Mesh(ordered_devices(shape, np.array(devices).tolist()), AXES, axis_types=types)


def run_mesh_sizes(spec: str | None) -> dict[str, int]:
    """Return the sizes of the mesh of a run: by default one device, or all devices on `data` with several processes."""
    if spec is not None:
        return parse_mesh(spec)
    return parse_mesh(f"{DATA}={1 if jax.process_count() == 1 else jax.device_count()}")


def run_mesh(spec: str | None) -> Mesh | None:
    """Return the mesh of a run; None for one device without an explicit `spec`."""
    return None if spec is None and jax.process_count() == 1 else make_mesh(spec)


def run_devices(spec: str | None) -> list[jax.Device]:
    """Return the devices of a run, those of other processes included."""
    mesh = run_mesh(spec)
    return jax.devices()[:1] if mesh is None else mesh.devices.ravel().tolist()


def describe_devices(spec: str | None) -> str:
    """Return the number and the kind of the devices of a run, as "8 NVIDIA H200".

    Raises `UserError` if the mesh has another number of devices than there are.
    """
    return f"{len(run_devices(spec))} {jax.devices()[0].device_kind}"


def data_parallel_size(shape: Mapping[str, int]) -> int:
    """Return the number of devices that the rows of a batch are sharded over.

    >>> data_parallel_size(parse_mesh("data=2,fsdp=4,sequence=2,tensor=3"))
    8
    """
    return math.prod(shape.get(axis, 1) for axis in ROWS)


def sequence_parallel_size(shape: Mapping[str, int]) -> int:
    """Return the number of devices that the tokens of a row are sharded over."""
    return shape.get(SEQUENCE, 1)
