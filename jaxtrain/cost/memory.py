"""How much memory there is, and amounts of bytes in words."""

import os
import re
import resource
import sys
from pathlib import Path

import jax

from jaxtrain.errors import UserError

_UNITS = {f"{letter}{binary}B": (1024 if binary else 1000) ** (i + 1)
          for binary in ("i", "") for i, letter in enumerate("KMGT")}  # fmt: skip
# What a container may have at most (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def device_memory() -> int:
    """Bytes that programs may have of the first device; of the machine, or of its container, where that is its CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or host_memory(_LIMITS))


def host_memory(limits: tuple[Path, ...]) -> int:
    """Bytes of the machine; less where a file of a container's `limits` says so."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = [path.read_text().strip() for path in limits if path.is_file()]
    return min([whole, *(int(limit) for limit in said if limit.isdecimal())])


def peak_memory_bytes() -> int:
    """The most bytes in use so far on this process's first device; of the whole process where the device is the CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def parsed_bytes(amount: str) -> int:
    """The bytes of an amount with its unit. Raises `UserError` for what is none.

    >>> parsed_bytes("1.5GiB"), parsed_bytes("40 GB")
    (1610612736, 40000000000)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B)", amount.strip(), re.ASCII)
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2]])):
        raise UserError(f"{amount[:50]!r} is no amount of memory: write it with its unit, as in 16GiB or 40GB")
    return size


def parsed_bandwidth(rate: str) -> float:
    """The bytes a second of a rate with its unit. Raises `UserError` for what is none.

    >>> parsed_bandwidth("50GB/s"), parsed_bandwidth("400 Gbit/s")
    (50000000000.0, 50000000000.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(?:([KMGT]i?B)|([KMGT])bit)/s", rate.strip(), re.ASCII)
    if found is None or not (number := float(found[1])):
        raise UserError(f"{rate[:50]!r} is no bandwidth: write it with its unit, as in 50GB/s or 400Gbit/s")
    return number * (_UNITS[found[2]] if found[2] else _UNITS[f"{found[3]}B"] / 8)


def shown_bytes(size: float) -> str:
    """The amount in words, to three digits or so.

    >>> shown_bytes(1610612736), shown_bytes(250 * 2**20)
    ('1.50 GiB', '250 MiB')
    """
    if size < 2**10:
        return f"{size:.0f} B"
    unit = next(u for u in ("TiB", "GiB", "MiB", "KiB") if size >= _UNITS[u])
    amount = size / _UNITS[unit]
    return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
