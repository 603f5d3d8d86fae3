"""Check the collectives of the local devices: psum, all-gather, reduce-scatter."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from parity.selftest.check_result import CheckResult

AXIS = "devices"
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, AXIS),
    "all-gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "reduce-scatter": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
}


def collectives() -> Iterator[CheckResult]:
    """Run each collective over all local devices on integers, which float32 adds exactly."""
    devices = jax.local_devices()
    if len(devices) == 1:
        yield CheckResult("collectives", None, "one device: nothing to communicate")
        return
    n = len(devices)
    # A row of n · 256 numbers for each device, below 2^20.
    values = np.arange(n * n * 256, dtype=np.float32).reshape(n, -1) % 1021
    total = values.sum(0)
    expected = {
        "psum": np.broadcast_to(total, values.shape),
        "all-gather": np.broadcast_to(values.ravel(), (n, values.size)),
        "reduce-scatter": total.reshape(n, -1),
    }
    mesh = Mesh(np.array(devices), (AXIS,))
    for name, collective in COLLECTIVES.items():
        found = _on_each(collective, mesh, values).reshape(expected[name].shape)
        wrong = [str(device) for device, a, b in zip(devices, found, expected[name], strict=True) if (a != b).any()]
        detail = f"wrong on {', '.join(wrong)}" if wrong else f"exact on each of {n} devices"
        yield CheckResult(f"{name}, {n} devices", not wrong, detail)


def _on_each(collective: Callable[[Any], Any], mesh: Mesh, rows: np.ndarray) -> np.ndarray:
    """The result of a collective on each device's row, device after device."""
    each = PartitionSpec(AXIS)
    # Replicated results are read from every device.
    mapped = jax.shard_map(
        lambda row: collective(row[0])[None], mesh=mesh, in_specs=each, out_specs=each, check_vma=False
    )
    return np.asarray(jax.jit(mapped)(rows))
