"""Programs that a released compiler computed wrongly, compared with NumPy before anything is trained.

A new program is added with the report of its fault. Each is as small as the fault allows: all together take 0.3 s.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.user_cache import user_cache

BOUND = 2.0**-14
"""Largest error relative to the largest value: programs sum a few hundred float32 terms, and faults are of order 1."""

Computed = tuple[jax.Array, np.ndarray]


def sums_of_products() -> Computed:
    """Sums over products of rows: jaxlib 0.10.2 on CPUs, from row 32,768 on (jax-ml/jax#39103)."""
    matrix = np.array([[1, 2, 0], [0, 1, 3], [1, 0, 1]], np.float32)
    rows = (np.arange(3 * 32_800, dtype=np.float32) % 7).reshape(-1, 3)
    sums = jax.jit(jax.vmap(lambda row: jnp.sum(jnp.matmul(matrix, row, precision="highest") ** 2)))
    return sums(rows), ((rows.astype(np.float64) @ matrix.T) ** 2).sum(1)


def single_operations() -> Computed:
    """Operations outside of a jitted function: jaxlib 0.11.1 on some GPUs (jax-ml/jax#40633)."""
    x = np.array([512.0, 1.0, 2.25, 1e-3], np.float32)
    wide = x.astype(np.float64)
    found = jnp.stack([jnp.sqrt(x), jnp.asarray(x) + 1, jnp.exp(-x)])
    return found, np.stack([np.sqrt(wide), wide + 1, np.exp(-wide)])


def joined_masks() -> Computed:
    """Normalized rows under two joined masks, joined with others: Triton in jaxlib 0.10.2 to 0.11 on GPUs
    (jax-ml/jax#40588, jax-ml/jax#39486)."""
    rng = np.random.default_rng(0)
    rows, others = rng.standard_normal((4, 60, 256), np.float32), rng.standard_normal((4, 4, 256), np.float32)
    first, second = rng.random((4, 20)) > 0.5, rng.random((4, 40)) > 0.5

    @jax.jit
    def joined(rows: jax.Array, others: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        mask = jnp.concatenate([first, second], 1)[..., None]
        kept = jnp.where(mask, rows, np.float32(0))
        normed = kept * jax.lax.rsqrt((kept * kept).mean(-1, keepdims=True) + np.float32(1e-6))
        return jnp.concatenate([jnp.where(mask, normed, np.float32(0)), others], 1)

    mask = np.concatenate([first, second], 1)[..., None]
    kept = np.where(mask, rows, 0).astype(np.float64)
    normed = kept / np.sqrt((kept**2).mean(-1, keepdims=True) + 1e-6)
    return joined(rows, others, first, second), np.concatenate([normed, others], 1)


PROGRAMS: Mapping[str, Callable[[], Computed]] = {
    "sums of products of rows": sums_of_products,
    "single operations": single_operations,
    "rows under joined masks": joined_masks,
}
"""The programs by what they compute."""


def error(program: Callable[[], Computed]) -> float:
    """Return the largest difference from NumPy's float64 result, relative to the largest value; NaN if one is NaN.

    >>> error(sums_of_products) < BOUND
    True
    """
    found, expected = program()
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())


def miscompiled(device: jax.Device, programs: Mapping[str, Callable[[], Computed]] = PROGRAMS) -> Sequence[str]:
    """Return the names of the programs that are computed wrongly on a device.

    Args:
      device: The device.
      programs: The programs by name.

    Example:
      >>> miscompiled(jax.devices()[0])
      []
    """
    with jax.default_device(device), jax.default_matmul_precision("highest"), jax.enable_x64(False):
        return [name for name, program in programs.items() if not error(program) <= BOUND]


def miscompiled_once(device: jax.Device) -> Sequence[str]:
    """Return what `miscompiled` does, without running the programs again on a device and a JAX that computed all well.

    That all are right is noted in the user's cache folder, by the versions of JAX and of the device's runtime, the kind
    of device and XLA's options. Where there is no such folder, the programs run each time.
    """
    runtime = jax.__version__, jax.lib.__version__, device.client.platform_version, device.device_kind
    key = repr((runtime, os.environ.get("XLA_FLAGS"), Path(__file__).read_text()))
    name = hashlib.sha256(key.encode()).hexdigest()
    if not _is_marked(name):
        if wrong := miscompiled(device):
            return wrong
        _mark(name)
    return []


def _is_marked(name: str) -> bool:
    with contextlib.suppress(OSError, UserError):
        return (user_cache("compiler") / name).exists()
    return False


def _mark(name: str) -> None:
    with contextlib.suppress(OSError, UserError):
        folder = user_cache("compiler")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
