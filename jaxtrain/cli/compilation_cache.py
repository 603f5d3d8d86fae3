"""XLA's persistent compilation cache, shared by the commands."""

import os
from pathlib import Path

import jax

from jaxtrain.user_cache import prune, user_cache

MAX_BYTES = 8 * 2**30
"""Upper bound of the size of the user's cache at the start of a command."""


def enable_compilation_cache() -> Path:
    """Store compiled programs for later commands and bound the size of what earlier ones stored.

    JAX_COMPILATION_CACHE_DIR names a folder that is used as it is; the size of the default one is bounded.

    Returns:
      The folder that programs are stored in.
    """
    # `jax_compilation_cache_max_size` (JAX 0.10) fails on entries written without it, and needs the package filelock.
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = Path(named) if named else user_cache("xla")
    if not named:
        prune(folder, "*-cache", MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Starting a run compiles dozens of operations that take 10 ms each.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return folder
