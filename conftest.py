"""Settings of every test, doctests of the package included: they must stand before jax is first imported."""

import os
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"

for name, value in {
    "JAX_PLATFORMS": "cpu",
    # Four devices for sharding; LLVM's optimisations take longer than our tiny programs run.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4"
    # Of a program divided over devices some wait for the others, whose turn may be long in coming.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    # PyTorch's threads, two to a worker, would wait for each other.
    "OMP_NUM_THREADS": "1",
    # Workers and later runs share what is compiled, however fast it compiled.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAXTRAIN_TOKEN_CACHE": str(CACHE / "tokens"),
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # What JAX would silently widen or broadcast is an error.
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from hypothesis.database import DirectoryBasedExampleDatabase  # noqa: E402

from tests.slowest import listed  # noqa: E402

settings.register_profile("dev", deadline=None, database=DirectoryBasedExampleDatabase(CACHE / "hypothesis"))
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what was measured to be."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    """Let no race of the workers fail a test."""
    # Two workers may meet over one entry of the compilation cache: the loser compiles again, and says so.
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")
