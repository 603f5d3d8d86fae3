"""Operations in 64 bits, whatever width JAX gives integers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import.ops.table import TABLE, op

INT64 = "jaxtrain.int64.default"
"""An operation of the table on integers that may be beyond int32, or on float64. Its first argument is the overload,
its keyword argument `promoted` the dtype that an elementwise operation converts its arguments to, `narrow` says that
integers of the result fit in int32, or are read modulo 2**32, and `result` is the dtype of a floating-point result."""
FLOAT64 = ("float64", "complex128")


def holds_int64(x: Any) -> bool:
    """Return whether an array is one of int64, or a concrete one with integers beyond int32."""
    dtype = getattr(x, "dtype", None)
    if dtype != np.int64 or isinstance(x, jax.Array):
        return bool(dtype == np.int64)
    limits = np.iinfo(np.int32)
    return bool(x.size and (x.min() < limits.min or x.max() > limits.max))


def has_64_bits() -> bool:
    """Return whether JAX is in x64 mode."""
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def rounds(x: Any) -> bool:
    """Return whether an array is one of NumPy's float64 that JAX would round."""
    return _is_float64(x) and not has_64_bits()


def _is_float64(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.name in FLOAT64


def int64_array(values: Any) -> np.ndarray:
    """Return integers beyond int32 as an array of NumPy, which `int64` reads."""
    return np.array(values, np.int64)


def as_int64(x: Any) -> Any:
    """Return a constant of integers beyond int32, or of float64, as JAX's array; others as they are.

    Its bits are two arrays of 32: a constant of 64 would lose the upper ones where a program is compiled.
    """
    if _is_float64(x):
        with jax.enable_x64(True):
            if np.iscomplexobj(x):
                return jax.lax.complex(as_int64(np.real(x)), as_int64(np.imag(x)))
            return jax.lax.bitcast_convert_type(_of_bits(np.array(x).view(np.int64)), np.float64)
    return x if isinstance(x, jax.Array) or not holds_int64(x) else _of_bits(np.asarray(x, np.int64))


def _of_bits(bits: np.ndarray) -> jax.Array:
    high, low = (bits >> 32).astype(np.int32), bits.astype(np.uint32)
    with jax.enable_x64(True):
        return (jnp.asarray(high).astype(np.int64) << 32) | jnp.asarray(low).astype(np.int64)


@op("int64.default", library="jaxtrain")
def int64(
    overload: str,
    *args: Any,
    promoted: str | None = None,
    narrow: bool = False,
    result: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call an operation of PyTorch, by its overload, in 64 bits."""

    def widened(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        x = as_int64(x)
        if promoted is not None:
            return jnp.asarray(x, promoted)
        return x.astype(np.int64) if x.dtype == np.int32 else x

    def narrowed(x: Any) -> Any:
        return x.astype(np.int32) if narrow and not wide and getattr(x, "dtype", None) == np.int64 else x

    wide = has_64_bits()
    with jax.enable_x64(True):
        args, kwargs = jax.tree.map(widened, (args, kwargs))
        found = jax.tree.map(narrowed, TABLE[overload](*args, **kwargs))
        return found if result is None else jnp.asarray(found, result)
