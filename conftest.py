"""Settings of all tests and doctests, which must be set before JAX is imported."""

import importlib.metadata
import os
from pathlib import Path

# Outside of the checkout, so that a fresh clone has the programs that another one compiled. Versions have their own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxtrain-tests"
CACHE /= f"jaxlib-{importlib.metadata.version('jaxlib')}"

# The former emitters of XLA:CPU compile five times faster; later versions of jaxlib abort on unknown flags.
# `parity selftest` runs with the flags that users have.
FORMER_EMITTERS = (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10.")
    # Those after them contract a * b + c to one instruction that rounds once, in some kernels and not in others.
    # Without it, programs of the same operations have the same bits.
    else " --xla_cpu_max_isa=AVX"
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
OF_CPU = {
    # Four devices for sharding; collectives may wait long for a device whose thread gets no core.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    # Compilation dominates the tests; without LLVM's optimizations it takes half the time.
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" + FORMER_EMITTERS,
}
# jaxlib 0.10.1 logs two errors for each program of the cache (`jaxtrain.cpu.program_log`).
OF_CPU["TF_CPP_MIN_LOG_LEVEL"] = "3"
# The tests measure the memory that is in use, not what is reserved.
OF_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

for name, value in {
    **(OF_CPU if os.environ["JAX_PLATFORMS"].startswith("cpu") else OF_GPU),
    # With several threads per worker, PyTorch's threads would wait for each other.
    "OMP_NUM_THREADS": "1",
    # Workers and later runs share all compiled programs, however short their compilation.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAXTRAIN_TOKEN_CACHE": str(CACHE / "tokens"),
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # Implicit promotion of dtypes and ranks is an error.
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}.items():
    os.environ.setdefault(name, value)

import ctypes  # noqa: E402
import gc  # noqa: E402

# Until all tests are collected: the many imports allocate much, and nothing of it becomes garbage.
gc.disable()

import platform  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from hypothesis.database import DirectoryBasedExampleDatabase  # noqa: E402

import jaxtrain.cli  # noqa: E402

pytest_plugins = ["tests.lowering", "tests.tiers"]

settings.register_profile("dev", deadline=None, database=DirectoryBasedExampleDatabase(CACHE / "hypothesis"))
# Where CI is set, hypothesis would draw the same examples in every commit.
settings.register_profile("ci", deadline=None, database=None, derandomize=False)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A worker that has grown by this much drops its compiled programs after the test.
MAX_GROWTH_BYTES = 1e9
# The resident size of a worker after its programs were last dropped.
BASE_RESIDENT_BYTES = pytest.StashKey[int]()

# The commands make glibc retain freed memory for the whole process, so that workers would only grow.
jaxtrain.cli.keep_host_memory = lambda: False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only the tests for GPUs if only they are selected: others import packages that they do not need."""
    gpu = Path(__file__).parent / "tests" / "gpu"
    if config.getoption("markexpr") != "gpu" or collection_path in (gpu, *gpu.parents):
        return None
    return gpu not in collection_path.parents or None


def pytest_collection_finish() -> None:
    """Exclude what is imported by now from garbage collection, and collect less often: tracing allocates much."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Ignore the warning of two workers that write one entry of the compilation cache at the same time."""
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give every test the same random numbers, whichever tests ran before it in its process."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Return the memory of compiled programs to the system after a test if a worker has grown."""
    base = item.config.stash.setdefault(BASE_RESIDENT_BYTES, 0)
    if platform.libc_ver()[0] == "glibc" and resident_bytes() > base + MAX_GROWTH_BYTES:
        import jax

        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        item.config.stash[BASE_RESIDENT_BYTES] = resident_bytes()


def pytest_sessionfinish() -> None:
    """Collect garbage once: pytest collects it five times at exit, which takes seconds in a worker's large heap."""
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Return the resident size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
