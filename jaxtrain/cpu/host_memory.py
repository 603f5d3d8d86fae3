"""Memory that a process keeps instead of giving it back to the operating system and asking again at every step.

XLA's CPU backend allocates the temporaries of a step as one block and frees it at the step's end. glibc maps blocks
that large from the kernel, which fills every page with zeros as it is first touched: 13,000 page faults a step of a
small GPT-2, a third of its time. `keep_host_memory` has glibc take them from its heap, and keep the heap.
"""

import ctypes
import platform

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1


def keep_host_memory() -> bool:
    """Have this process keep what it frees. Whether it does: only glibc can be told.

    To be called before anything that starts threads is imported, numpy among them, as the commands do; the process then
    holds until its end the most it ever held. One arena serves all threads: the others cannot hold blocks over 64 MiB.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
