"""XLA's persistent compilation cache, shared by the commands."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> Path:
    """Store compiled programs for later commands, and return the folder they are stored in."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(cache) / "jaxtrain" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
