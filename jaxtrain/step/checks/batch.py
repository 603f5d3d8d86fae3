"""What a step requires of the arrays of a batch: numbers that JAX has, and rows that agree before they are divided."""

import math
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name

_INTEGERS: dict[str, Any] = {"i": np.int32, "u": np.uint32}
"""What JAX makes of 64-bit integers without x64 mode, by kind: it keeps the lower 32 bits."""


def require_32_bits(batch: Any, what: str = "the batch") -> None:
    """Raise `UserError` for a number of a batch on the host that JAX would replace by another.

    Every batch is checked, because every batch has other values; only arrays of 64 bits are read, which are copied to
    32 bits in any case. Arrays on devices and traced ones have passed this already. A float64 may be rounded to
    float32, but not to infinity.

    Args:
      batch: A pytree.
      what: What it is, for the message.

    Example:
      >>> require_32_bits({"label": np.array([1, 2**32 + 1])})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxtrain.errors.UserError: the batch holds 4294967297 at label, which int32 cannot hold: use smaller numbers...
    """
    if jax.config.read("jax_enable_x64") or all(_outside(leaf) is None for leaf in jax.tree.leaves(batch)):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if found := _outside(leaf):
            value, kind = found
            raise UserError(
                f"{what} holds {value} at {path_name(path) or 'its root'}, which {kind} cannot hold: use smaller "
                "numbers, or set jax_enable_x64"
            )


def _outside(leaf: Any) -> tuple[float, str] | None:
    """Return a number that its type in JAX cannot hold, and that type; None if there is none."""
    if type(leaf) in (int, float):
        values, kind = np.asarray(leaf, object), "i" if type(leaf) is int else "f"
    elif _is_64_bit(leaf):
        values, kind = np.asarray(leaf), leaf.dtype.kind
    else:
        return None
    if kind == "f" and not (values.size and math.isfinite(values.min()) and math.isfinite(values.max())):
        values = values[np.isfinite(values.astype(np.float64))]
    bounds: Any = np.finfo(np.float32) if kind == "f" else np.iinfo(_INTEGERS[kind])
    for value in (values.min(), values.max()) if values.size else ():
        number = value.item() if isinstance(value, np.generic) else value
        if not float(bounds.min) <= number <= float(bounds.max):
            return number, bounds.dtype.name
    return None


def _is_64_bit(leaf: Any) -> bool:
    # Of JAX those made in x64 mode, which a call outside of it narrows.
    is_array = isinstance(leaf, np.ndarray | np.generic) or (
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable
    )
    return is_array and isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "iuf" and leaf.dtype.itemsize == 8


def require_rows(batch: Any) -> None:
    """Raise `UserError` for a batch of arrays without rows: its loss would be 0, and nothing would be learned.

    Example:
      >>> require_rows({"x": np.ones((0, 4)), "y": np.ones(0)})
      Traceback (most recent call last):
      jaxtrain.errors.UserError: the arrays of the batch have no rows: leave such batches out
    """
    arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    if arrays and not any(np.shape(array)[0] for array in arrays):
        raise UserError("the arrays of the batch have no rows: leave such batches out")


def require_equal_rows(batch: Any) -> None:
    """Raise `UserError` for arrays of a batch that do not all have the same first axis: they cannot be divided alike.

    Example:
      >>> require_equal_rows({"class_weight": np.ones(10), "x": np.ones((8, 4))})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxtrain.errors.UserError: the arrays of the batch have different numbers of rows, 10 at class_weight and 8 ...
    """
    if found := differing_rows(batch):
        raise UserError(
            f"{found}: give each a leading axis of rows, or leave what is not of the rows out of the batch, in "
            "params or closed over by loss_fn"
        )


def differing_rows(batch: Any) -> str | None:
    """Return which two arrays of a batch have different first axes, or None; scalars have none."""
    rows = [
        (path_name(path) or "batch", np.shape(leaf)[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(leaf)
    ]
    for name, n in rows:
        if n != rows[0][1]:
            first, of_first = rows[0]
            return f"the arrays of the batch have different numbers of rows, {of_first} at {first} and {n} at {name}"
    return None
