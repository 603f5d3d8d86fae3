"""Operations that create tensors, and conversions of dtype."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.passes import in_float32
from jaxtrain.torch_import.ops.table import op, ops

op("leaf.default", library="jaxtrain")(jax.lax.stop_gradient)

ops(
    {
        "zeros.default empty.memory_format empty_permuted.default empty_strided.default": (
            lambda size, *_, dtype=None: jnp.zeros(size, dtype)
        ),
        "ones.default": lambda size, dtype=None: jnp.ones(size, dtype),
        "full.default": lambda size, fill_value, dtype=None: jnp.full(size, fill_value, dtype),
        "zeros_like.default empty_like.default": lambda x, dtype=None: jnp.zeros(x.shape, dtype or x.dtype),
        "ones_like.default": lambda x, dtype=None: jnp.ones(x.shape, dtype or x.dtype),
        "full_like.default": lambda x, fill_value, dtype=None: jnp.full(x.shape, fill_value, dtype or x.dtype),
        "new_zeros.default new_empty.default new_empty_strided.default": (
            lambda x, size, *_, dtype=None: jnp.zeros(size, dtype or x.dtype)
        ),
        "new_ones.default": lambda x, size, dtype=None: jnp.ones(size, dtype or x.dtype),
        "new_full.default": lambda x, size, fill_value, dtype=None: jnp.full(size, fill_value, dtype or x.dtype),
        "fill.Scalar": lambda x, value: jnp.full(x.shape, value, x.dtype),
        "fill.Tensor": lambda x, value: jnp.broadcast_to(value, x.shape).astype(x.dtype),
        "zero.default": jnp.zeros_like,
        "scalar_tensor.default": lambda value, dtype=None: jnp.asarray(value, dtype),
        "eye.default": lambda n, dtype=None: jnp.eye(n, dtype=dtype),
        "eye.m": lambda n, m, dtype=None: jnp.eye(n, m, dtype=dtype),
        "_to_copy.default": lambda x, dtype=None: x if dtype is None else x.astype(dtype),
        "to.dtype": lambda x, dtype, *_, **__: x.astype(dtype),
        "to.device": lambda x, _, dtype, *__, **___: x.astype(dtype),
        "to.dtype_layout": lambda x, dtype=None, **_: x if dtype is None else x.astype(dtype),
        "type_as.default to.other": lambda x, other, *_, **__: x.astype(other.dtype),
        "tril_indices.default": lambda row, col, offset=0, **_: jnp.stack(jnp.tril_indices(row, offset, col)),
        "triu_indices.default": lambda row, col, offset=0, **_: jnp.stack(jnp.triu_indices(row, offset, col)),
    }
)


op("float32.default", library="jaxtrain")(in_float32)


@op("arange.default", "arange.start", "arange.start_step")
def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> jax.Array:
    """Numbers from start to end. Computed by NumPy, in float64, as PyTorch does."""
    start, end = (0, start) if end is None else (start, end)
    values = np.arange(start, end, step)
    if values.dtype.kind == "f":
        # NumPy adds the difference of the first two numbers.
        values = start + step * np.arange(len(values), dtype=np.float64)
    return jnp.asarray(values, dtype or (np.float32 if values.dtype.kind == "f" else np.int32))


@op("linspace.default")
def linspace(start: Any, end: Any, steps: int, dtype: Any = None) -> jax.Array:
    """Numbers at equal distances."""
    real = np.dtype(dtype or np.float32)
    if real.kind != "f":
        return jnp.linspace(start, end, steps, dtype=dtype)
    start, end = real.type(start), real.type(end)
    if steps < 2:
        return jnp.full(steps, start)
    step, places = (end - start) / real.type(steps - 1), np.arange(steps).astype(real)
    # Up to the middle from the start, then from the end (`linspace_kernel` in `cpu/RangeFactoriesKernel.cpp`).
    values = np.where(places < steps // 2, start + step * places, end - step * (real.type(steps - 1) - places))
    return jnp.asarray(values, real)


@op("copy.default")
def copy(x: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    """The values of src in the shape and dtype of x."""
    del non_blocking
    return jnp.broadcast_to(src, x.shape).astype(x.dtype)


@op("one_hot.default")
def one_hot(x: jax.Array, num_classes: int = -1) -> jax.Array:
    """One-hot vectors of a given length."""
    return jax.nn.one_hot(x, num_classes, dtype=np.int32)


@op("outer.default", "ger.default")
def outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """Products of all pairs."""
    return x[:, None] * y


@op("cartesian_prod.default")
def cartesian_prod(tensors: Sequence[jax.Array]) -> jax.Array:
    """All tuples of elements."""
    grid = jnp.meshgrid(*tensors, indexing="ij")
    return grid[0] if len(grid) == 1 else jnp.stack([x.ravel() for x in grid], -1)
