"""Constant tensors as expressions."""

from typing import Any

import jax
import numpy as np

from jaxtrain.torch_import.ops.int64 import holds_int64, rounds
from jaxtrain.torch_import.source.expressions import Expr, call, literal, subscript

_LARGEST = 16
"""Elements of the largest tensor that is written out."""


def inline(value: Any) -> Expr | None:
    """Return a constant as an expression, if it is small or regular; None for another one."""
    array = np.asarray(value)
    dtype = literal(np.dtype(jax.dtypes.canonicalize_dtype(array.dtype)))
    if array.dtype.kind not in "biuf":
        return None
    if holds_int64(array):
        return call("F.int64_array", Expr(str(array.tolist())))
    if rounds(array):
        return call("np.array", Expr(str(array.tolist()))) if array.size <= _LARGEST else None
    if array.ndim == 0:
        return call("jnp.asarray", array.item(), dtype)
    if array.size and (array == array.flat[0]).all():
        item = array.flat[0].item()
        if item in (0, 1):
            return call("jnp.zeros" if item == 0 else "jnp.ones", array.shape, dtype)
        return call("jnp.full", array.shape, item, dtype)
    if array.dtype.kind in "iu" and np.array_equal(array.ravel(), np.arange(array.size)):
        positions = call("jnp.arange", array.size, dtype=dtype)
        if array.ndim == 1:
            return positions
        if array.shape == (1, array.size):
            return subscript(positions, None)
        return call(f"{positions}.reshape", *array.shape)
    if array.size <= _LARGEST:
        written = call("jnp.array", Expr(str(array.tolist())), dtype)
        return written if len(written.text) < 70 else None
    return None
