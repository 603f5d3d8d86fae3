"""What a step requires of the arrays of a batch: integers that JAX has, and rows that agree before they are divided."""

from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name

_NARROW: dict[str, Any] = {"i": np.int32, "u": np.uint32}
"""What JAX makes of 64-bit integers without x64 mode, by kind: it keeps the lower 32 bits."""


def require_integers(batch: Any, what: str = "the batch") -> None:
    """Raise `UserError` for an integer of a batch on the host that JAX would replace by another.

    Every batch is checked, because every batch has other values; only arrays of 64-bit integers are read, which are
    copied to 32 bits in any case. Arrays on devices and traced ones have passed this already.

    Args:
      batch: A pytree.
      what: What it is, for the message.

    Example:
      >>> require_integers({"label": np.array([1, 2**32 + 1])})  # doctest: +ELLIPSIS
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


def _outside(leaf: Any) -> tuple[int, str] | None:
    """Return an integer that its type in JAX cannot hold, and that type; None if there is none."""
    if type(leaf) is int:
        ends: list[int] = [leaf]
        narrow = np.int32
    elif _is_64_bit(leaf) and leaf.size:
        values = np.asarray(leaf)
        ends = [int(values.min()), int(values.max())]
        narrow = _NARROW[values.dtype.kind]
    else:
        return None
    bounds = np.iinfo(narrow)
    outside = [value for value in ends if not bounds.min <= value <= bounds.max]
    return (outside[0], bounds.dtype.name) if outside else None


def _is_64_bit(leaf: Any) -> bool:
    # Of JAX those made in x64 mode, which a call outside of it narrows.
    is_array = isinstance(leaf, np.ndarray | np.generic) or (
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable
    )
    return is_array and isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in _NARROW and leaf.dtype.itemsize == 8


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
