"""Check the installation and the devices, and name the command that fixes each problem. Nothing is changed."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtrain.errors import UserError
from jaxtrain.user_cache import user_cache

if TYPE_CHECKING:
    from jaxtrain.program.internals import Internal

TESTED_JAX = "0.10.1" if sys.version_info < (3, 12) else "0.12.0.1"
"""The version of JAX in constraints.txt."""
TESTED_TORCH = "2.13.0"
"""The version of PyTorch in constraints.txt."""
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
OPEN_FILES = 4096
"""Data loaders, checkpoints and logs open some hundreds of files; the default of a shell may be 256."""
ROOM = 64 * 2**20
"""Default bytes of shared memory of a container; NCCL and multi-process data loaders need more."""
SIDE = 256
"""Rows and columns of the matrices that each device multiplies."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
      name: What was checked.
      status: "fine", "note" for information, or "problem".
      message: What was found.
      fix: The command or action that fixes a problem.
    """

    name: str
    status: Literal["fine", "note", "problem"]
    message: str
    fix: str = ""


def run_checks() -> Iterator[Finding]:
    """Yield the findings as they arrive, fast checks first.

    >>> next(run_checks()).name
    'python'
    """
    for check in CHECKS:
        yield from check()


def python() -> Iterator[Finding]:
    """Report the versions of Python and of the operating system."""
    message = f"{platform.python_version()} at {sys.executable}, {platform.platform()}, {os.cpu_count()} cores"
    yield Finding("python", "fine", message)


def packages() -> Iterator[Finding]:
    """Check that jax, jaxlib and the plugin of the accelerator have the same version."""
    found = installed_versions(("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", *PLUGINS))
    message = ", ".join(f"{name} {version}" for name, version in found.items())
    jax = found.get("jax", "")
    # Versions that differ only in the patch number are compatible.
    unlike = [n for n in ("jaxlib", *PLUGINS) if n in found and found[n].split(".")[:2] != jax.split(".")[:2]]
    families = {name[4:10] for name in PLUGINS if name in found}
    if "jaxlib" not in found or not jax:
        yield Finding("packages", "problem", message, "pip install --force-reinstall jax jaxlib")
    elif len(families) > 1:
        remove = " ".join(name for name in PLUGINS if "cuda12" in name and name in found)
        yield Finding("packages", "problem", f"{message}: plugins for two CUDAs", f"pip uninstall {remove}")
    elif unlike:
        wanted = " ".join(f"{name}=={jax}" for name in unlike)
        yield Finding(
            "packages", "problem", f"{message}: {', '.join(unlike)} differ from jax's version", f"pip install {wanted}"
        )
    else:
        yield Finding("packages", "fine", message)


def torch() -> Iterator[Finding]:
    """Report PyTorch, which is optional: for parity, benchmarks and PyTorch checkpoints."""
    found = installed_versions(("torch", "transformers", "safetensors"))
    if "torch" in found:
        yield Finding("torch", "fine", ", ".join(f"{name} {version}" for name, version in found.items()))
    else:
        yield Finding("torch", "note", "not installed; parity and import-torch need it: pip install 'jaxtrain[parity]'")


def limits() -> Iterator[Finding]:
    """Check the limits of open files, shared memory and disk space."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < OPEN_FILES and files != resource.RLIM_INFINITY:
        yield Finding("open files", "problem", f"{files} at most", f"ulimit -n {min(OPEN_FILES, most)}")
    else:
        yield Finding("open files", "fine", f"{files} at most")
    if SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(SHARED_MEMORY).total
        message = f"{total / 2**20:,.0f} MiB in {SHARED_MEMORY}"
        if total <= ROOM:
            yield Finding("shared memory", "problem", message, "start the container with --shm-size=8g or --ipc=host")
        else:
            yield Finding("shared memory", "fine", message)
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("disk", "fine" if free > 2**30 else "problem", f"{free / 2**30:,.1f} GiB free in {Path.cwd()}",
                  "" if free > 2**30 else "free disk space: a checkpoint that does not fit is lost")  # fmt: skip


def settings() -> Iterator[Finding]:
    """Report environment variables that configure JAX; some of them change numbers."""
    given = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", "NCCL_", "CUDA_"))}
    message = ", ".join(f"{name}={value}" for name, value in sorted(given.items()))
    yield Finding("environment", "note" if given else "fine", message or "nothing set for JAX, XLA, NCCL or CUDA")


def devices() -> Iterator[Finding]:
    """Check that JAX finds the accelerator of the driver, and that each device computes correct products."""
    import jax

    found = jax.local_devices()
    kinds = ", ".join(f"{device.platform}:{device.id} {device.device_kind}" for device in found)
    if DRIVER.exists() and found[0].platform == "cpu":
        yield Finding("devices", "problem", f"{kinds}, although {_driver()}", _gpu_fix(os.environ))
    else:
        yield Finding("devices", "fine", kinds + (f"; {_driver()}" if DRIVER.exists() else ""))
    for device in found:
        yield from products(device)
    yield from programs(found[0])


def products(device: object) -> Iterator[Finding]:
    """Compare a matrix product in each dtype on `device` with NumPy's in float64."""
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
        # In units of the dtype's epsilon: a correct product is within a few.
        error = float(np.sqrt(np.mean((product - truth) ** 2) / np.mean(truth**2)))
        apart[np.dtype(dtype).name] = error / float(jnp.finfo(dtype).eps)
    message = ", ".join(f"{name} {error:.2f}" for name, error in apart.items())
    name = f"{device}"
    if all(error < 4 for error in apart.values()):
        yield Finding(name, "fine", f"correct products: errors in units of epsilon {message}")
    else:
        yield Finding(name, "problem", f"wrong products: errors in units of epsilon {message}",
                      "update the driver and jax; if it persists, replace the device")  # fmt: skip


def programs(device: Any) -> Iterator[Finding]:
    """Run programs that a released compiler computed wrongly."""
    from jaxtrain.debug.miscompiled import PROGRAMS, miscompiled

    if wrong := miscompiled(device):
        fix = f"pip install jax=={TESTED_JAX}, which jaxtrain is tested with, and repeat what was trained with this one"
        yield Finding("compiled programs", "problem", f"wrong on {device.device_kind}: {', '.join(wrong)}", fix)
    else:
        yield Finding("compiled programs", "fine", f"all {len(PROGRAMS)} that a released JAX got wrong are right")


def cache() -> Iterator[Finding]:
    """Check that the commands can write to the persistent compilation cache."""
    import jax

    named = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    path = named or str(user_cache("xla"))  # the one of the commands
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        yield Finding(
            "compilation cache", "problem", f"{path}: {error.strerror}", f"make it writable: chmod u+w {path}"
        )
        return
    scripts = "" if named else f"; scripts of your own use it with JAX_COMPILATION_CACHE_DIR={path}"
    yield Finding("compilation cache", "fine", f"{len(list(Path(path).iterdir()))} files in {path}{scripts}")


def compiler() -> Iterator[Finding]:
    """Measure the time to compile and run a small program."""
    import jax
    import jax.numpy as jnp

    begin = time.perf_counter()
    jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((64, 64))).block_until_ready()
    yield Finding("compiler", "fine", f"a small program in {time.perf_counter() - begin:.2f} s")


def collectives() -> Iterator[Finding]:
    """Check the communication library between processes."""
    import jax

    nccl = installed_versions(("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    if jax.default_backend() == "gpu" and not nccl:
        yield Finding("collectives", "problem", "NCCL is not installed", "pip install 'jaxtrain[cuda13]'")
    else:
        over_cpu = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
        message = [*(f"{name} {version}" for name, version in nccl.items()), f"{over_cpu} between CPUs"]
        yield Finding("collectives", "fine", ", ".join(message))


def internals() -> Iterator[Finding]:
    """Check that JAX still has the private names that this package uses."""
    from jaxtrain.program.internals import INTERNALS

    yield _internals("jax", INTERNALS)


def torch_internals() -> Iterator[Finding]:
    """Check that PyTorch, if it is installed, still has the private names that this package uses."""
    if not installed_versions(("torch",)):
        return
    try:
        from jaxtrain.torch_internals import INTERNALS
    except UserError as error:
        yield Finding("torch internals", "problem", str(error), f"pip install torch=={TESTED_TORCH}")
        return
    yield _internals("torch", INTERNALS)


def _internals(library: str, listed: "Sequence[Internal]") -> Finding:
    from jaxtrain.program.internals import missing_internals

    name, version = f"{library} internals", importlib.metadata.version(library)
    if missing := missing_internals(listed):
        names = "; ".join(f"{internal.name} (used by {internal.used_by})" for internal in missing)
        tested = {"jax": TESTED_JAX, "torch": TESTED_TORCH}[library]
        fix = f"install the version that jaxtrain is tested with: pip install {library}=={tested}"
        return Finding(name, "problem", f"{library} {version} lacks {names}", fix)
    return Finding(name, "fine", f"all {len(listed)} are present in {library} {version}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
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
    torch_internals,
)


def installed_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed packages among `names`.

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
    return f"an NVIDIA driver is installed ({' '.join(first.split()[-12:-6]) or first})"


def _gpu_fix(environment: Mapping[str, str]) -> str:
    if "cpu" in environment.get("JAX_PLATFORMS", ""):
        return "unset JAX_PLATFORMS"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES"
    return "pip install 'jaxtrain[cuda13]', or [cuda12] for a driver before 580"
