"""Peak memory: the device's where it counts, the process's on a CPU."""

import resource
import sys

import jax


def peak_memory_bytes() -> int:
    """The most bytes in use so far on this process's first device; of the whole process where the device is the CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
