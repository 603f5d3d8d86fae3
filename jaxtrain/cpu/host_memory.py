"""Keep freed memory in the process instead of returning it to the operating system after every step.

XLA's CPU backend allocates the temporaries of a step as one block and frees it at the step's end. glibc maps blocks
that large from the kernel, which zeroes every page at its first access: 13,000 page faults per step of a small GPT-2,
a third of its time. `keep_host_memory` makes glibc allocate them on its heap, and retain the heap.
"""

import ctypes
import os
import pkgutil
import platform
from importlib.util import find_spec
from pathlib import Path

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1
# Device nodes of NVIDIA GPUs, of AMD GPUs and of TPUs: without one, JAX falls back to the CPU.
_ACCELERATORS = ("nvidia[0-9]*", "dxg", "kfd", "accel[0-9]*", "vfio/[0-9]*")


def keep_host_memory() -> bool:
    """Make this process retain the memory it frees, with glibc only and if JAX will run on the CPU.

    Call it before importing anything that starts threads, numpy included, as the commands do. The process then holds
    its peak memory until it ends. One arena serves all threads: other arenas cannot hold blocks over 64 MiB. With an
    accelerator nothing is changed: the temporaries are on the device, and the threads that read the data would wait
    for each other at the only arena.

    Returns:
      Whether the setting was applied; False without glibc, and for a GPU or TPU.
    """
    if platform.libc_ver()[0] != "glibc" or not runs_on_cpu():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)


def runs_on_cpu(devices: Path = Path("/dev")) -> bool:
    """Return whether JAX's default backend will be the CPU, without importing JAX.

    Args:
      devices: The folder of device nodes.

    Returns:
      Whether `JAX_PLATFORMS` puts the CPU first; if it is not set, whether an accelerator or JAX's plugin for one is
      missing.
    """
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.partition(",")[0].strip() == "cpu"
    return not (_has_plugin() and any(any(devices.glob(pattern)) for pattern in _ACCELERATORS))


def _has_plugin() -> bool:
    plugins = find_spec("jax_plugins")
    found = plugins is not None and any(pkgutil.iter_modules(plugins.submodule_search_locations))
    return found or find_spec("libtpu") is not None
