"""Memory of the device and of the host: how much there is, and the peak in use."""

import os
import resource
import sys
from pathlib import Path

import jax

# Memory limits of a container (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_memory() -> int:
    """Return the bytes available to programs on the first local device; for a CPU, the memory of the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or host_memory(_LIMITS))


def host_memory(limit_files: tuple[Path, ...]) -> int:
    """Return the bytes of memory of the machine, or the lowest limit of its container that one of the files states."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in limit_files if path.is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdecimal())])


def peak_memory_bytes() -> int:
    """Return the peak bytes in use on the first local device so far; on a CPU, of the whole process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
