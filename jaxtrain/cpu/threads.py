"""The number of threads of XLA:CPU for simulated devices.

A device that waits in a collective blocks a thread of the pool that all simulated devices share, by default one for
each device or core. XLA starts a collective behind a loop as soon as the loop has started, if it does not depend on the
loop's results. Such a device then waits for the others there, and has no thread left to continue its loop, in which the
others wait for it: the program hangs.
"""

import re
from collections.abc import MutableMapping

_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_PER_DEVICE = 4
"""Loops are nested over micro-batches and layers, and a device can wait once at each level."""


def reserve_collective_threads(environment: MutableMapping[str, str]) -> None:
    """Set `PJRT_NPROC` to a number of threads with which programs on simulated devices do not hang.

    Call it before JAX starts, as the commands do. Without simulated devices, or if the variable or `NPROC` is set,
    nothing is changed.

    Args:
      environment: The environment variables, `os.environ`.

    Example:
      >>> environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
      >>> reserve_collective_threads(environment)
      >>> environment["PJRT_NPROC"]
      '32'
    """
    found = _DEVICES.findall(environment.get("XLA_FLAGS", ""))
    devices = int(found[-1]) if found else 1
    if devices > 1 and "NPROC" not in environment:
        environment.setdefault("PJRT_NPROC", str(_PER_DEVICE * devices))
