"""What is installed, which devices answer, what is wrong, and the command that mends it.

A check looks at one thing and says what it found. Nothing is changed.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
OPEN_FILES = 4096
"""Data loaders, checkpoints and logs hold some hundreds of files; a shell's default may be 256."""
ROOM = 64 * 2**20
"""Bytes of shared memory, what a container has by default: NCCL and data loaders of several processes want more."""
SIDE = 256
"""Of the square matrices that a device multiplies."""


@dataclass(frozen=True)
class CheckResult:
    """What a check `said`: "fine", "note" for what is as it may be, or "problem", with its `mend`."""

    name: str
    status: Literal["fine", "note", "problem"]
    said: str
    mend: str = ""


def run_checks() -> Iterator[CheckResult]:
    """The findings, one by one, the quick ones first.

    >>> next(run_checks()).name
    'python'
    """
    for check in CHECKS:
        yield from check()


def python() -> Iterator[CheckResult]:
    """Its version and the machine's."""
    said = f"{platform.python_version()} at {sys.executable}, {platform.platform()}, {os.cpu_count()} cores"
    yield CheckResult("python", "fine", said)


def packages() -> Iterator[CheckResult]:
    """jax, jaxlib and the plugin of the accelerator, which must be of one version."""
    found = installed_versions(("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", *PLUGINS))
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    jax = found.get("jax", "")
    # Versions that differ in their last number are made to work together.
    unlike = [n for n in ("jaxlib", *PLUGINS) if n in found and found[n].split(".")[:2] != jax.split(".")[:2]]
    families = {name[4:10] for name in PLUGINS if name in found}
    if "jaxlib" not in found or not jax:
        yield CheckResult("packages", "problem", said, "pip install --force-reinstall jax jaxlib")
    elif len(families) > 1:
        remove = " ".join(name for name in PLUGINS if "cuda12" in name and name in found)
        yield CheckResult("packages", "problem", f"{said}: plugins for two CUDAs", f"pip uninstall {remove}")
    elif unlike:
        wanted = " ".join(f"{name}=={jax}" for name in unlike)
        yield CheckResult(
            "packages", "problem", f"{said}: {', '.join(unlike)} not of jax's version", f"pip install {wanted}"
        )
    else:
        yield CheckResult("packages", "fine", said)


def torch() -> Iterator[CheckResult]:
    """Optional: for parity, benchmarks and PyTorch's checkpoints."""
    found = installed_versions(("torch", "transformers", "safetensors"))
    if "torch" in found:
        yield CheckResult("torch", "fine", ", ".join(f"{name} {version}" for name, version in found.items()))
    else:
        yield CheckResult(
            "torch", "note", "not installed; parity and import-torch need it: pip install 'jaxtrain[parity]'"
        )


def limits() -> Iterator[CheckResult]:
    """Of open files, shared memory and disk."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < OPEN_FILES and files != resource.RLIM_INFINITY:
        yield CheckResult("open files", "problem", f"{files} at most", f"ulimit -n {min(OPEN_FILES, most)}")
    else:
        yield CheckResult("open files", "fine", f"{files} at most")
    if SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(SHARED_MEMORY).total
        said = f"{total / 2**20:,.0f} MiB in {SHARED_MEMORY}"
        if total <= ROOM:
            yield CheckResult("shared memory", "problem", said, "start the container with --shm-size=8g or --ipc=host")
        else:
            yield CheckResult("shared memory", "fine", said)
    free = shutil.disk_usage(Path.cwd()).free
    yield CheckResult("disk", "fine" if free > 2**30 else "problem", f"{free / 2**30:,.1f} GiB free in {Path.cwd()}",
                  "" if free > 2**30 else "make room: a checkpoint that does not fit is lost")  # fmt: skip


def settings() -> Iterator[CheckResult]:
    """What the environment tells JAX, some of which changes numbers."""
    given = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "NCCL_", "CUDA_"))}
    said = ", ".join(f"{name}={value}" for name, value in sorted(given.items()))
    yield CheckResult("environment", "note" if given else "fine", said or "nothing set for JAX, XLA, NCCL or CUDA")


def devices() -> Iterator[CheckResult]:
    """Whether JAX finds the accelerator that the driver sees, and whether each device multiplies rightly."""
    import jax

    found = jax.local_devices()
    kinds = ", ".join(f"{device.platform}:{device.id} {device.device_kind}" for device in found)
    if DRIVER.exists() and found[0].platform == "cpu":
        yield CheckResult("devices", "problem", f"{kinds}, though {_driver()}", _gpu_mend(os.environ))
    else:
        yield CheckResult("devices", "fine", kinds + (f"; {_driver()}" if DRIVER.exists() else ""))
    for device in found:
        yield from products(device)


def products(device: object) -> Iterator[CheckResult]:
    """A product in each dtype on `device`, beside NumPy's in float64."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIDE, SIDE)) for _ in range(2))
    apart = {}
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        low = [np.asarray(x, dtype) for x in (a, b)]
        truth = low[0].astype(np.float64) @ low[1].astype(np.float64)
        given = [jax.device_put(x, device) for x in low]
        product = np.asarray(jnp.matmul(*given, precision="highest"), np.float64)
        # In units of the dtype's rounding: a right product is within a few.
        error = float(np.sqrt(np.mean((product - truth) ** 2) / np.mean(truth**2)))
        apart[np.dtype(dtype).name] = error / float(jnp.finfo(dtype).eps)
    said = ", ".join(f"{name} {error:.2f}" for name, error in apart.items())
    name = f"{device}"
    if all(error < 4 for error in apart.values()):
        yield CheckResult(name, "fine", f"multiplies rightly: errors in roundings {said}")
    else:
        yield CheckResult(name, "problem", f"multiplies wrongly: errors in roundings {said}",
                      "update the driver and jax; if it stays, replace the device")  # fmt: skip


def cache() -> Iterator[CheckResult]:
    """Whether a program that was compiled once is found again."""
    import jax

    path = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if path is None:
        yield CheckResult(
            "compilation cache", "note", "off: JAX_COMPILATION_CACHE_DIR=~/.cache/jax keeps what is compiled"
        )
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        yield CheckResult(
            "compilation cache", "problem", f"{path}: {error.strerror}", f"make it writable: chmod u+w {path}"
        )
        return
    yield CheckResult("compilation cache", "fine", f"{len(list(Path(path).iterdir()))} files in {path}")


def compiler() -> Iterator[CheckResult]:
    """How long a small program takes to compile and run."""
    import jax
    import jax.numpy as jnp

    begin = time.perf_counter()
    jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((64, 64))).block_until_ready()
    yield CheckResult("compiler", "fine", f"a small program in {time.perf_counter() - begin:.2f} s")


def collectives() -> Iterator[CheckResult]:
    """What several processes would talk through."""
    import jax

    nccl = installed_versions(("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    if jax.default_backend() == "gpu" and not nccl:
        yield CheckResult("collectives", "problem", "NCCL is not installed", "pip install 'jaxtrain[cuda13]'")
    else:
        over_cpu = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
        said = [*(f"{name} {version}" for name, version in nccl.items()), f"{over_cpu} between CPUs"]
        yield CheckResult("collectives", "fine", ", ".join(said))


def internals() -> Iterator[CheckResult]:
    """Check that JAX still has the private names that this package uses."""
    import jax

    from jaxtrain.transforms.jax_internals import INTERNALS, missing_internals

    missing = missing_internals()
    if missing:
        names = "; ".join(f"{internal.name} (used by {internal.used_by})" for internal in missing)
        fix = "install a JAX version that jaxtrain is tested with: pip install 'jax>=0.10,<0.11'"
        yield CheckResult("JAX internals", "problem", f"jax {jax.__version__} lacks {names}", fix)
    else:
        yield CheckResult("JAX internals", "fine", f"all {len(INTERNALS)} are present in jax {jax.__version__}")


CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
    python,
    packages,
    torch,
    limits,
    settings,
    devices,
    compiler,
    cache,
    collectives,
    internals,
)


def installed_versions(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those that are.

    >>> [*installed_versions(("jax", "no-such-package"))]
    ['jax']
    """
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    first = DRIVER.read_text().splitlines()[0]
    return f"an NVIDIA driver is there ({' '.join(first.split()[-12:-6]) or first})"


def _gpu_mend(environment: Mapping[str, str]) -> str:
    if "cpu" in environment.get("JAX_PLATFORMS", ""):
        return "unset JAX_PLATFORMS"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES"
    return "pip install 'jaxtrain[cuda13]', or [cuda12] for a driver before 580"
