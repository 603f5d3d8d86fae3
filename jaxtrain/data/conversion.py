"""Conversion of the values that users provide into NumPy arrays that JAX takes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxtrain.errors import UserError

# JAX's default types; with jax_enable_x64 the wide ones are kept.
_NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32, "complex128": np.complex64}
_REMEDY = "tokenize or drop it, in a transform of the examples or in collate"


def as_array(value: Any, name: str, where: str) -> NDArray[Any]:
    """Convert a value into an array of numbers or booleans, of a type that JAX has.

    64-bit types become 32-bit ones unless `jax_enable_x64` is set; other types are kept.

    Args:
      value: Array of NumPy, JAX or PyTorch, number, or (nested) list of numbers.
      name: Name of the value, for error messages.
      where: What contains it, for error messages, such as "example 3".

    Returns:
      The array; it shares the memory of `value` if the type is kept.

    Raises:
      UserError: It is none of these, ragged, or a number does not fit into 32 bits.

    Example:
      >>> as_array([1.5, 2], "x", "example 0")
      array([1.5, 2. ], dtype=float32)
      >>> as_array("text", "x", "example 0")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxtrain.errors.UserError: 'x' of example 0 is 'text' (str), not numbers: tokenize or drop it, in a transform ...
    """
    return _narrow(_to_numpy(value, name, where), name, lambda index: f"{where} at {list(index)}" if index else where)


def stack(values: Sequence[Any], name: str, numbers: Sequence[int]) -> NDArray[Any]:
    """Stack the values that the examples of a batch have under one name, converted as by `as_array`.

    Args:
      values: One value of each example.
      name: Their name.
      numbers: The number of each example, for error messages.

    Returns:
      An array with a leading axis of the examples.

    Raises:
      UserError: A value is refused by `as_array`, or their shapes differ.

    Example:
      >>> stack([1, 2], "label", [0, 1])
      array([1, 2], dtype=int32)
      >>> stack([[1], [1, 2]], "tokens", [7, 9])  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxtrain.errors.UserError: 'tokens' has shape [1] in example 7 but [2] in example 9: pad it, or give a collate ...
    """
    stacked = _stack_numpy(values)
    if stacked is None:
        arrays = [_to_numpy(value, name, f"example {number}") for value, number in zip(values, numbers, strict=True)]
        for array, number in zip(arrays, numbers, strict=True):
            if array.shape != arrays[0].shape:
                raise UserError(
                    f"{name!r} has shape {list(arrays[0].shape)} in example {numbers[0]} but {list(array.shape)} in"
                    f" example {number}: pad it, or give a collate function that does"
                )
        stacked = np.stack(arrays)
    return _narrow(stacked, name, lambda index: f"example {numbers[index[0]]}")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch, without importing it.

    Example:
      >>> is_tensor([1.0])
      False
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _stack_numpy(values: Sequence[Any]) -> NDArray[Any] | None:
    """Return the stacked values in the usual case, without a check of each: NumPy arrays of one shape."""
    kinds = {*map(type, values)}
    if len(kinds) != 1 or not issubclass(kind := kinds.pop(), np.ndarray | np.generic) or kind is np.ma.MaskedArray:
        return None
    try:
        stacked = np.stack(values)
    except ValueError:
        return None
    return stacked if _is_numeric(stacked.dtype) else None


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or hasattr(ml_dtypes, dtype.name)


def _to_numpy(value: Any, name: str, where: str) -> NDArray[Any]:
    """Return the value as an array of its own type, which is numeric or boolean."""
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise UserError(
                f"{name!r} of {where} is a masked array: give x.filled(0), and the mask under a name of its own"
            )
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
        elif is_tensor(value):
            array = tensor_to_numpy(value)
        elif isinstance(value, bool | int | float | complex | list | tuple) or hasattr(value, "__array__"):
            array = np.asarray(value)
        else:
            array = None
    except (TypeError, ValueError) as error:
        raise UserError(f"{name!r} of {where} is not an array ({str(error).splitlines()[0]}): {_REMEDY}") from None
    if (beyond := _beyond_64_bits(value, array)) is not None:
        raise UserError(f"{name!r} of {where} has {beyond}, which int64 cannot hold: use smaller numbers")
    if array is None or not _is_numeric(array.dtype):
        shown = repr(value)
        shown = shown if len(shown) <= 40 and "\n" not in shown else type(value).__name__
        kind = type(value).__name__ if array is None else array.dtype.name
        raise UserError(f"{name!r} of {where} is {shown} ({kind}), not numbers: {_REMEDY}")
    return array


def _beyond_64_bits(value: Any, array: NDArray[Any] | None) -> int | None:
    """Return a Python integer for which NumPy has no type, so that it makes objects or rounds to float64; or None."""
    if array is None or not isinstance(value, int | list | tuple):
        return None
    if array.dtype.kind == "O" or (array.dtype == np.float64 and array.size and np.abs(array).max() >= 2**63):
        return next((x for x in np.asarray(value, object).flat if type(x) is int and not -(2**63) <= x < 2**63), None)
    return None


def tensor_to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a PyTorch tensor as an array, which may share its memory."""
    kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if kind is None:
        array: NDArray[Any] = tensor.numpy(force=True)
        return array
    # PyTorch's NumPy conversion has no bfloat16 and float8: pass their bits.
    torch = sys.modules["torch"]
    bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
    array = tensor.contiguous().view(bits).numpy(force=True)
    return array.view(kind)


def _narrow(array: NDArray[Any], name: str, where: Callable[[tuple[int, ...]], str]) -> NDArray[Any]:
    """Return the array in JAX's default type; `where` describes an index of it in an error message."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    kind = _NARROW.get(array.dtype.name)
    if kind is None or jax.config.read("jax_enable_x64"):
        return array
    with np.errstate(all="ignore"):
        narrow: NDArray[Any] = array.astype(kind)
    is_integer = array.dtype.kind in "iu"
    lost = narrow != array if is_integer else np.isfinite(array) & ~np.isfinite(narrow)
    if lost.any():
        index = tuple(np.argwhere(lost)[0].tolist())
        raise UserError(
            f"{name!r} of {where(index)} has {array[index]}, which {narrow.dtype} cannot hold:"
            " use smaller numbers, or set jax_enable_x64"
        )
    return narrow
