"""Constant tensors as expressions."""

from typing import Any

import numpy as np

from jaxtrain.torch_import.source.expressions import Expr, call, literal, subscript

_LARGEST = 16
"""Elements of the largest tensor that is written out."""


def inline(value: Any) -> Expr | None:
    """Return a constant as an expression, if it is small or regular; None for another one."""
    array = np.asarray(value)
    dtype = literal(array.dtype)
    if array.dtype.kind not in "biuf":
        return None
    if array.ndim == 0:
        return call("np.asarray", array.item(), _np(dtype))
    if array.size and (array == array.flat[0]).all():
        item = array.flat[0].item()
        if item in (0, 1):
            return call("np.zeros" if item == 0 else "np.ones", array.shape, _np(dtype))
        return call("np.full", array.shape, item, _np(dtype))
    if array.dtype.kind in "iu" and np.array_equal(array.ravel(), np.arange(array.size)):
        positions = call("np.arange", array.size, dtype=_np(dtype))
        if array.ndim == 1:
            return positions
        if array.shape == (1, array.size):
            return subscript(positions, None)
        return call(f"{positions}.reshape", *array.shape)
    if array.size <= _LARGEST:
        written = call("np.array", Expr(str(array.tolist())), _np(dtype))
        return written if len(written.text) < 70 else None
    return None


def _np(dtype: Expr) -> Expr:
    return Expr(dtype.text.replace("jnp.", "np."))
