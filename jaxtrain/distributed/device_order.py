"""The order of devices in a mesh: those joined by fast links are neighbors along its inner axes.

Devices joined by fast links form a slice: the GPUs of a host (or of an NVLink domain) or the TPUs of a pod. Several
slices are joined by a network. The outermost axes of a mesh are divided over the slices and the others lie within one,
as `jax.experimental.mesh_utils.create_hybrid_device_mesh` places them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from numpy.typing import NDArray

from jaxtrain.errors import UserError

DCN = "dcn"
"""The mesh axis whose groups are whole nodes or pods."""


def ordered_devices(shape: Mapping[str, int], devices: Sequence[Any]) -> NDArray[Any]:
    """Return the devices in the order of a mesh.

    Where the devices do not report slices, the processes are the slices of a mesh with an axis dcn. The devices of a
    single process are simulated nodes.

    Args:
      shape: Sizes of the mesh by axis, outermost first.
      devices: The devices.

    Returns:
      An array of the shape of the mesh.

    Raises:
      UserError: The axis dcn would divide a slice, or slices have different numbers of devices.
    """
    slices = Counter(getattr(device, "slice_index", 0) for device in devices)
    processes = Counter(device.process_index for device in devices)
    by_process = len(slices) == 1 and shape.get(DCN, 1) > 1
    granules, kind = (processes, "processes") if by_process else (slices, "slices")
    if len(granules) == 1:
        return jax.make_mesh(tuple(shape.values()), tuple(shape), devices=devices).devices
    outer = _outer_sizes(shape, len(granules))
    if outer.get(DCN, 1) != shape.get(DCN, 1):
        raise UserError(
            f"mesh axis {DCN}={shape[DCN]} would divide a node: use a divisor of {len(granules)}, the number of {kind}"
        )
    if len(counts := sorted({*granules.values()})) > 1:
        raise UserError(f"some {kind} have {counts[0]} devices and some {counts[-1]}: use as many of each")
    inner = tuple(shape[axis] // n for axis, n in outer.items())
    return mesh_utils.create_hybrid_device_mesh(
        inner, tuple(outer.values()), sorted(devices, key=lambda d: d.id), process_is_granule=by_process
    )


def _outer_sizes(shape: Mapping[str, int], slices: int) -> dict[str, int]:
    """Return the number of parts of each axis that lie on different slices: as many as possible of the outermost."""
    outer = {}
    for axis, n in shape.items():
        outer[axis] = math.gcd(n, slices)
        slices //= outer[axis]
    return outer
