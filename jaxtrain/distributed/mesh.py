"""The mesh: devices in a grid whose axes say what is divided over them.

Over `data` the rows of a batch are divided; over `fsdp` rows too, and with them parameters, gradients and optimizer
state (ZeRO stage 3, Rajbhandari et al. 2020); over `sequence` the tokens of a row, as in context parallelism (Llama 3,
Grattafiori et al. 2024, section 3.3.2); over `tensor` the matrices of a layer (Shoeybi et al. 2019).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtrain.errors import UserError
from jaxtrain.fields import brief

AXES = DATA, FSDP, SEQUENCE, TENSOR = "data", "fsdp", "sequence", "tensor"
ROWS = (DATA, FSDP)
"""The axes over which rows are divided."""


def sizes(spec: str) -> dict[str, int]:
    """The size of every axis, those left out being 1.

    >>> sizes("data=2,fsdp=4")
    {'data': 2, 'fsdp': 4, 'sequence': 1, 'tensor': 1}

    Raises `UserError` for an axis that is unknown, said twice or of no size.
    """
    said: dict[str, int] = {}
    for part in spec.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UserError(
                f"mesh {brief(spec)} has an axis {brief(axis)}: choose of {', '.join(AXES)}, as in data=2,fsdp=4"
            )
        if axis in said:
            raise UserError(f"mesh {brief(spec)} says {axis} twice: say it once")
        if not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise UserError(
                f"mesh {brief(spec)} gives {axis} the size {brief(size)}: make it a number of devices, 1 or more"
            )
        said[axis] = int(size)
    return {axis: said.get(axis, 1) for axis in AXES}


def make_mesh(spec: str | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `spec` says, as "data=2,fsdp=4", of `devices`, all there are by default; without, all on `data`.

    Neighbours on the last axes are neighbours in hardware: what they say to each other is the most. Raises `UserError`
    where the sizes do not multiply to the number of devices.

    >>> dict(make_mesh("data=1", jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'sequence': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else devices
    shape = sizes(f"{DATA}={len(devices)}" if spec is None else spec)
    product = math.prod(shape.values())
    if product != len(devices):
        raise UserError(
            f"mesh {brief(spec)} is of {product} devices and there are {len(devices)}: make its sizes multiply to that"
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=types, devices=np.array(devices).tolist())


def resolved(spec: str | None) -> dict[str, int]:
    """The sizes of the mesh that a run is on: without a `spec` one device, or in several processes all, on `data`."""
    if spec is not None:
        return sizes(spec)
    return sizes(f"{DATA}={1 if jax.process_count() == 1 else jax.device_count()}")


def run_mesh(spec: str | None) -> Mesh | None:
    """The mesh that a run is on; None where that is one device, and nobody has said so."""
    return None if spec is None and jax.process_count() == 1 else make_mesh(spec)


def ways(shape: Mapping[str, int]) -> int:
    """Over how many devices the rows of a batch are divided.

    >>> ways(sizes("data=2,fsdp=4,sequence=2,tensor=3"))
    8
    """
    return math.prod(shape.get(axis, 1) for axis in ROWS)


def sequence_ways(shape: Mapping[str, int]) -> int:
    """Over how many devices the tokens of a row are divided."""
    return shape.get(SEQUENCE, 1)
