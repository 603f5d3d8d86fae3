"""Where compiled programs are kept from one command to the next."""

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> Path:
    """Let XLA keep what it compiles from one run to the next, and say where."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(cache) / "jaxtrain" / "xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
